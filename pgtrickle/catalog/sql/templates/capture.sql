#variable_conflict use_column
DECLARE
    wanting text;
    fits boolean;
    touched boolean;
    context text;
    -- Which of the two tables is written: see _purge(). Either is right, so reading it takes no lock.
    spare boolean := coalesce(pg_sequence_last_value('{turn}') % 2 = 0, false);
BEGIN
    -- Nearly always true, and one expression because each costs a single-row writer about 3 microseconds.
    IF NOT (TG_NAME = 'pgtrickle_capture_' || lower(TG_OP) || '_{stable_name}' AND TG_RELID = {source}
            AND TG_OP <> 'TRUNCATE' AND current_setting('transaction_isolation') = 'read committed'
            AND pg_stat_get_live_tuples(CASE WHEN spare THEN '{spare}'::regclass
                                             ELSE '{buffer}' END) <= {buffer_limit}) THEN
        IF TG_NAME <> 'pgtrickle_capture_' || lower(TG_OP) || '_{stable_name}' THEN
            RETURN NULL; -- attached under another name, it would capture twice
        ELSIF TG_RELID <> {source} AND NOT pgtrickle._descends(TG_RELID, {source}) THEN
            IF current_setting('transaction_isolation') = 'read committed' THEN
                RETURN NULL; -- a detached partition
            ELSIF {source} NOT IN (SELECT pg_partition_ancestors(TG_RELID)) THEN -- ignores the snapshot
                RAISE EXCEPTION 'could not serialize access to %, whose parents have changed', TG_RELID::regclass
                    USING ERRCODE = 'serialization_failure', HINT = 'Retry the transaction.';
            END IF;
            wanting := 'SCHEMA'; -- a partition that was attached after this snapshot
        ELSIF TG_OP = 'TRUNCATE' THEN
            wanting := 'TRUNCATE';
        ELSIF pg_stat_get_live_tuples(CASE WHEN spare THEN '{spare}'::regclass
                                           ELSE '{buffer}' END) > {buffer_limit}
              AND pgtrickle._overflows('{buffer}') THEN
            wanting := 'OVERFLOW';
        ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
            IF NOT coalesce({names_match}, false) THEN
                fits := false;
            ELSIF TG_OP = 'DELETE' THEN
                fits := {old_types_match};
            ELSE
                fits := {new_types_match};
            END IF;
            IF NOT fits THEN
                wanting := 'SCHEMA';
            END IF;
        END IF;
    END IF;
{check_merge}{store}END
