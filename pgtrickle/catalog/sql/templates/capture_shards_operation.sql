        IF pg_catalog.pg_sequence_last_value({turn_relation}) OPERATOR(pg_catalog.%) 2 OPERATOR(pg_catalog.=) 1 THEN
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', pg_catalog.txid_current()
            FROM {actual_types}
            WHERE r.types OPERATOR(pg_catalog.=) {expected_types}{partitions_fit}
              AND pg_catalog.pg_stat_get_live_tuples('{buffer}'::pg_catalog.regclass)
                  OPERATOR(pg_catalog.<=) {buffer_limit};
            IF FOUND THEN
                INSERT INTO {buffer} (__pgt_xid, __pgt_w{targets})
                {changes};
                RETURN NEW;
            END IF;
        ELSIF pg_catalog.pg_sequence_last_value({turn_relation}) OPERATOR(pg_catalog.%) 2 OPERATOR(pg_catalog.=) 0 THEN
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT '{stable_name}', pg_catalog.txid_current()
            FROM {actual_types}
            WHERE r.types OPERATOR(pg_catalog.=) {expected_types}{partitions_fit}
              AND pg_catalog.pg_stat_get_live_tuples('{spare}'::pg_catalog.regclass)
                  OPERATOR(pg_catalog.<=) {buffer_limit};
            IF FOUND THEN
                INSERT INTO {spare} (__pgt_xid, __pgt_w{targets})
                {changes};
                RETURN NEW;
            END IF;
        END IF;
        fits := (SELECT r.types OPERATOR(pg_catalog.=) {expected_types}
                 FROM {actual_types});
        IF fits IS NULL THEN
            RETURN NEW;
        END IF;
