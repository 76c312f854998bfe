-- Locks the catalog for an upgrade. Views first, as their readers do: LOCK TABLE would also lock the tables they read,
-- including PostgreSQL's own views.
DO $$
DECLARE
    relation record;
BEGIN
    FOR relation IN
        SELECT c.oid::pg_catalog.regclass AS name, c.relkind = 'v' AS is_view FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'pgtrickle'::pg_catalog.regnamespace AND c.relkind IN ('r', 'p', 'v')
        ORDER BY c.relkind = 'v' DESC, c.relname
    LOOP
        IF relation.is_view THEN
            EXECUTE pg_catalog.format('ALTER VIEW %s OWNER TO CURRENT_USER', relation.name);
        ELSE
            EXECUTE pg_catalog.format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', relation.name);
        END IF;
    END LOOP;
END
$$;
