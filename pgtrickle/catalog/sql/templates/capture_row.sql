    -- The INSERT into pgt_activity finds a row only if the columns fit; that sets FOUND.
    -- `fits` is true only in transactions with an old snapshot.
    IF wanting IS NULL THEN
        IF fits THEN
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', txid_current() WHERE pgtrickle._columns_fit_now{columns};
        ELSE
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', txid_current() WHERE pgtrickle._columns_fit{columns};
        END IF;
        IF FOUND THEN
            IF TG_OP <> 'INSERT' THEN
                IF spare THEN
                    INSERT INTO {spare} (__pgt_xid, __pgt_w{targets}) VALUES (txid_current(), -1{old_values});
                ELSE
                    INSERT INTO {buffer} (__pgt_xid, __pgt_w{targets}) VALUES (txid_current(), -1{old_values});
                END IF;
            END IF;
            IF TG_OP <> 'DELETE' THEN
                IF spare THEN
                    INSERT INTO {spare} (__pgt_xid, __pgt_w{targets}) VALUES (txid_current(), 1{new_values});
                ELSE
                    INSERT INTO {buffer} (__pgt_xid, __pgt_w{targets}) VALUES (txid_current(), 1{new_values});
                END IF;
            END IF;
            RETURN NULL;
        END IF;
    END IF;
    PERFORM pgtrickle._mark('{stable_name}', coalesce(wanting, 'SCHEMA'));
    RETURN NULL;
