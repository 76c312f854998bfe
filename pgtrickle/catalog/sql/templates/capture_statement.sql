    -- The INSERT into pgt_activity finds rows only if there are changes and the columns fit; that sets FOUND.
    -- `fits` is true only in transactions with an old snapshot.
    IF TG_OP = 'INSERT' AND wanting IS NULL THEN
        IF fits THEN
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', txid_current()
            WHERE EXISTS (SELECT FROM __pgt_new) AND pgtrickle._columns_fit_now{columns};
        ELSE
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', txid_current()
            WHERE EXISTS (SELECT FROM __pgt_new) AND pgtrickle._columns_fit{columns};
        END IF;
        IF FOUND THEN
            IF spare THEN
                INSERT INTO {spare} (__pgt_xid, __pgt_w{targets})
                SELECT txid_current(), 1::int2{selected} FROM __pgt_new AS r;
            ELSE
                INSERT INTO {buffer} (__pgt_xid, __pgt_w{targets})
                SELECT txid_current(), 1::int2{selected} FROM __pgt_new AS r;
            END IF;
            RETURN NEW; -- without an expression, the same as RETURN NULL
        END IF;
    ELSIF wanting IS NULL THEN
        IF fits THEN
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', txid_current()
            WHERE EXISTS (SELECT FROM __pgt_old) AND pgtrickle._columns_fit_now{columns};
        ELSE
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', txid_current()
            WHERE EXISTS (SELECT FROM __pgt_old) AND pgtrickle._columns_fit{columns};
        END IF;
        IF FOUND AND TG_OP = 'UPDATE' THEN
            IF spare THEN
                INSERT INTO {spare} (__pgt_xid, __pgt_w{targets})
                SELECT txid_current(), (-1)::int2{selected} FROM __pgt_old AS r
                UNION ALL
                SELECT txid_current(), 1::int2{selected} FROM __pgt_new AS r;
            ELSE
                INSERT INTO {buffer} (__pgt_xid, __pgt_w{targets})
                SELECT txid_current(), (-1)::int2{selected} FROM __pgt_old AS r
                UNION ALL
                SELECT txid_current(), 1::int2{selected} FROM __pgt_new AS r;
            END IF;
            RETURN NEW;
        ELSIF FOUND THEN
            IF spare THEN
                INSERT INTO {spare} (__pgt_xid, __pgt_w{targets})
                SELECT txid_current(), (-1)::int2{selected} FROM __pgt_old AS r;
            ELSE
                INSERT INTO {buffer} (__pgt_xid, __pgt_w{targets})
                SELECT txid_current(), (-1)::int2{selected} FROM __pgt_old AS r;
            END IF;
            RETURN NEW;
        END IF;
    END IF;
    IF TG_OP = 'INSERT' THEN
        touched := EXISTS (SELECT FROM __pgt_new);
    ELSIF TG_OP = 'TRUNCATE' OR wanting = 'MERGE' THEN
        touched := true;
    ELSE
        touched := EXISTS (SELECT FROM __pgt_old);
    END IF;
    IF touched THEN
        PERFORM pgtrickle._mark('{stable_name}', coalesce(wanting, 'SCHEMA'));
    END IF;
    RETURN NEW;
