    IF TG_OP = 'UPDATE' AND wanting IS NULL THEN
        GET DIAGNOSTICS context = PG_CONTEXT;
        IF pgtrickle._hides_moved_rows(TG_RELID, context) THEN
            wanting := 'MERGE';
        END IF;
    END IF;
