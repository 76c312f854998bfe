        GET DIAGNOSTICS context = PG_CONTEXT;
        IF pgtrickle._hides_moved_rows(TG_RELID, context) THEN
            PERFORM pgtrickle._mark('{stable_name}', 'MERGE');
            RETURN NEW;
        END IF;
