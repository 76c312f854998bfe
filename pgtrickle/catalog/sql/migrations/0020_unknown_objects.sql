-- Earlier versions let everybody create objects in pgtrickle_views. Drops objects that are not part of a stream table,
-- or have another owner than the stream table: their names could conflict with those of new stream tables, and the
-- state table of a former owner runs that owner's triggers.
DO $$
DECLARE
    catalog_owner CONSTANT oid := (SELECT n.nspowner FROM pg_namespace AS n WHERE n.nspname = 'pgtrickle');
    service CONSTANT oid := (SELECT r.oid FROM pg_roles AS r
                             JOIN pgtrickle.pgt_settings AS p ON p.name = 'service_role' AND p.value = r.rolname);
    stranger record;
BEGIN
    FOR stranger IN
        SELECT CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' WHEN 'S' THEN 'SEQUENCE'
                    WHEN 'f' THEN 'FOREIGN TABLE' ELSE 'TABLE' END AS kind,
               c.oid::regclass::text AS name, substring(c.relname FROM '^state_([0-9]+)$')::bigint AS state_of
        FROM pg_class AS c
        WHERE c.relnamespace = 'pgtrickle_views'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
          AND c.relowner IS DISTINCT FROM catalog_owner AND c.relowner IS DISTINCT FROM service
          AND NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s
                          JOIN pg_class AS t ON t.oid = s.pgt_relid AND t.relowner = c.relowner
                          WHERE (c.relkind, c.relname) IN (('v', 'q_' || s.pgt_id), ('r', 'state_' || s.pgt_id)))
        UNION ALL
        SELECT 'ROUTINE', p.oid::regprocedure::text, NULL
        FROM pg_proc AS p
        WHERE p.pronamespace = 'pgtrickle_views'::regnamespace
          AND NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s
                          JOIN pg_class AS t ON t.oid = s.pgt_relid AND t.relowner = p.proowner
                          WHERE p.oid IN (to_regprocedure(format('pgtrickle_views.read_%s(text)', s.pgt_id)),
                                          to_regprocedure(format('pgtrickle_views.read_%s(text, text[])', s.pgt_id)),
                                          to_regprocedure(format('pgtrickle_views.write_%s(text, text[])', s.pgt_id))))
        UNION ALL
        SELECT CASE t.typtype WHEN 'd' THEN 'DOMAIN' ELSE 'TYPE' END, t.oid::regtype::text, NULL
        FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
        WHERE t.typnamespace = 'pgtrickle_views'::regnamespace AND coalesce(c.relkind = 'c', true) AND t.typelem = 0
    LOOP
        BEGIN
            EXECUTE format('DROP %s %s', stranger.kind, stranger.name);
            UPDATE pgtrickle.pgt_stream_tables AS s SET reinit_reason = 'its state belonged to another role'
            WHERE s.pgt_id = stranger.state_of AND s.frontier IS NOT NULL;
        EXCEPTION WHEN OTHERS THEN
            RAISE WARNING '% % is not one of pgtrickle''s and cannot be dropped: %', lower(stranger.kind),
                    stranger.name, SQLERRM
                USING HINT = 'Drop it by hand, or ask its owner to.';
        END;
    END LOOP;
END
$$;
