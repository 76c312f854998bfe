    IF pg_catalog.to_regclass('{turn}') IS NULL THEN
        RETURN NEW;
    END IF;
    IF {captured_elsewhere} THEN
        RETURN NEW;
    END IF;
