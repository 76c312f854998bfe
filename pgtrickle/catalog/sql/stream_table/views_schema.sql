-- The schema pgtrickle_views, whose objects belong to owners of stream tables: who may create objects there, and when.

-- An ID whose names in pgtrickle_views are free, even if an earlier version let others create objects there.
CREATE OR REPLACE FUNCTION pgtrickle._next_id() RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    id bigint;
BEGIN
    LOOP
        id := nextval('pgtrickle.pgt_stream_tables_pgt_id_seq');
        EXIT WHEN NOT EXISTS (SELECT FROM pg_type AS t WHERE t.typnamespace = 'pgtrickle_views'::regnamespace
                              AND t.typname IN ('q_' || id, 'new_' || id, 'state_' || id))
            AND NOT EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = 'pgtrickle_views'::regnamespace
                            AND p.proname IN ('read_' || id, 'write_' || id));
    END LOOP;
    RETURN id;
END
$$;

-- Lets a role create objects in pgtrickle_views that it will own: until _close_views(), in this transaction only. Such
-- transactions are serialized.
CREATE OR REPLACE FUNCTION pgtrickle._open_views(caller name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE') THEN
        RETURN; -- may create objects there at any time
    END IF;
    PERFORM pgtrickle._lock('pgtrickle_views');
    INSERT INTO pgtrickle.pgt_openings (role) SELECT r.oid FROM pg_roles AS r
    WHERE r.rolname = caller ON CONFLICT DO NOTHING;
    EXECUTE format('GRANT CREATE ON SCHEMA pgtrickle_views TO %I', caller);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._close_views(caller name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stranger text;
BEGIN
    IF has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE') THEN
        RETURN;
    END IF;
    PERFORM pgtrickle._lock('pgtrickle_views'); -- held already, unless the caller did not open anything
    EXECUTE format('REVOKE CREATE ON SCHEMA pgtrickle_views FROM %I', caller);
    DELETE FROM pgtrickle.pgt_openings AS o USING pg_roles AS r WHERE r.rolname = caller AND o.role = r.oid;
    -- Whoever owns them now: objects can be given away.
    SELECT min(o.name) INTO stranger
    FROM (SELECT c.relname AS name, c.xmin AS written_by FROM pg_class AS c
          WHERE c.relnamespace = 'pgtrickle_views'::regnamespace AND c.relkind NOT IN ('i', 'I', 't', 'c')
            AND NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s JOIN pg_class AS t ON t.oid = s.pgt_relid
                            WHERE c.relkind = 'v' AND c.relname = 'q_' || s.pgt_id AND c.relowner = t.relowner)
          UNION ALL
          SELECT t.typname, t.xmin FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
          WHERE t.typnamespace = 'pgtrickle_views'::regnamespace AND coalesce(c.relkind = 'c', true)
            AND NOT EXISTS (SELECT FROM pg_type AS e JOIN pg_class AS r ON r.oid = e.typrelid
                            WHERE e.typarray = t.oid AND r.relkind <> 'c')
          UNION ALL
          SELECT o.oprname, o.xmin FROM pg_operator AS o WHERE o.oprnamespace = 'pgtrickle_views'::regnamespace
          UNION ALL
          SELECT l.collname, l.xmin FROM pg_collation AS l WHERE l.collnamespace = 'pgtrickle_views'::regnamespace
          UNION ALL
          SELECT x.stxname, x.xmin FROM pg_statistic_ext AS x WHERE x.stxnamespace = 'pgtrickle_views'::regnamespace
          UNION ALL
          SELECT v.conname, v.xmin FROM pg_conversion AS v WHERE v.connamespace = 'pgtrickle_views'::regnamespace
          UNION ALL
          SELECT g.cfgname, g.xmin FROM pg_ts_config AS g WHERE g.cfgnamespace = 'pgtrickle_views'::regnamespace
          UNION ALL
          SELECT d.dictname, d.xmin FROM pg_ts_dict AS d WHERE d.dictnamespace = 'pgtrickle_views'::regnamespace
          UNION ALL
          SELECT p.proname, p.xmin FROM pg_proc AS p
          WHERE p.pronamespace = 'pgtrickle_views'::regnamespace
            AND NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s
                            JOIN pg_class AS t ON t.oid = s.pgt_relid AND t.relowner = p.proowner
                            -- The second belongs to an earlier version, and is not called any more.
                            WHERE p.oid IN (SELECT pgtrickle._owner_functions(s.pgt_id))
                               OR p.oid = to_regprocedure(format('pgtrickle_views.read_%s(text)', s.pgt_id)))) AS o
    WHERE pgtrickle._is_of_this_transaction(o.written_by);
    -- The text of these functions keeps them from running with other rights.
    stranger := coalesce(stranger, (
        SELECT min('write_' || s.pgt_id) FROM pgtrickle.pgt_stream_tables AS s
        JOIN pg_class AS c ON c.oid = s.pgt_relid
        WHERE c.relowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = caller)
          AND NOT pgtrickle._are_owner_functions_current(s.pgt_id)
          AND NOT pgtrickle._are_owner_functions_earlier(s.pgt_id)
          AND EXISTS (SELECT pgtrickle._owner_functions(s.pgt_id))));
    IF stranger IS NOT NULL THEN
        RAISE EXCEPTION 'object % in schema pgtrickle_views was not created by pgtrickle', quote_ident(stranger)
            USING ERRCODE = 'invalid_object_definition',
                  HINT = 'Use pgtrickle.create_stream_table(), and a schema of your own for other objects.';
    END IF;
END
$$;

-- At the end of the transaction nobody keeps the privilege.
CREATE OR REPLACE FUNCTION pgtrickle._require_closed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM pgtrickle.pgt_openings) THEN
        RAISE EXCEPTION 'the creation of a stream table was not completed'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Use pgtrickle.create_stream_table().';
    END IF;
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS pgtrickle_closed ON pgtrickle.pgt_openings;
CREATE CONSTRAINT TRIGGER pgtrickle_closed AFTER INSERT ON pgtrickle.pgt_openings DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION pgtrickle._require_closed();
