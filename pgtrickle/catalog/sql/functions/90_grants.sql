-- Rights: everybody may look at the catalog and call the functions; only the service role writes.

GRANT USAGE ON SCHEMA pgtrickle TO PUBLIC;
-- Needed to name the capture function in CREATE TRIGGER; nothing in there is granted to PUBLIC.
GRANT USAGE ON SCHEMA pgtrickle_changes TO PUBLIC;
-- A stream table's view and functions belong to its owner, who therefore creates them.
GRANT USAGE, CREATE ON SCHEMA pgtrickle_views TO PUBLIC;
GRANT SELECT ON pgtrickle.pgt_stream_tables, pgtrickle.pgt_dependencies, pgtrickle.pgt_change_tracking,
    pgtrickle.pgt_refresh_history, pgtrickle.pgt_schema_version, pgtrickle.pgt_foreign_tables,
    pgtrickle.pgt_sharded_tables, pgtrickle.pgt_shards, pgtrickle.pgt_consumers, pgtrickle.pgt_foreign_functions TO PUBLIC;

CREATE OR REPLACE FUNCTION pgtrickle._grant_to_service(service name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former name := pgtrickle._service_role();
BEGIN
    IF former IS NOT NULL AND former <> service AND former <> current_user AND to_regrole(quote_ident(former)) IS NOT NULL THEN
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA pgtrickle, pgtrickle_changes FROM %I', former);
    END IF;
    IF service <> current_user THEN -- the owner has all rights, and must keep them
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgtrickle TO %I', service);
        EXECUTE format('REVOKE INSERT, UPDATE, DELETE ON pgtrickle.pgt_schema_version FROM %I', service);
        EXECUTE format('GRANT SELECT, DELETE ON ALL TABLES IN SCHEMA pgtrickle_changes TO %I', service);
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgtrickle._settle_schedules() TO %I', service);
    END IF;
    INSERT INTO pgtrickle.pgt_settings AS p (name, value) VALUES ('service_role', service)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, set_at = now(), set_by = excluded.set_by
        WHERE p.value <> excluded.value;
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._grant_to_service(name) FROM PUBLIC;
