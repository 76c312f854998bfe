-- Privileges. Everybody may read status; the functions that everybody may call are listed here, and no others can be
-- called (tests/security compares the list with the catalog).

GRANT USAGE ON SCHEMA pgtrickle TO PUBLIC;
-- Needed to name the capture function in CREATE TRIGGER; nothing in this schema is granted to PUBLIC, except the
-- functions of row triggers.
GRANT USAGE ON SCHEMA pgtrickle_changes TO PUBLIC;
-- A stream table's view and functions belong to its owner, who therefore creates them: see _open_views().
REVOKE CREATE ON SCHEMA pgtrickle, pgtrickle_changes, pgtrickle_views FROM PUBLIC;
GRANT USAGE ON SCHEMA pgtrickle_views TO PUBLIC;
GRANT CREATE ON SCHEMA pgtrickle_views TO pg_database_owner;

REVOKE ALL ON ALL TABLES IN SCHEMA pgtrickle FROM PUBLIC;
GRANT SELECT ON pgtrickle.pgt_dependencies, pgtrickle.pgt_change_tracking, pgtrickle.pgt_schema_version,
    pgtrickle.pgt_foreign_tables,
    pgtrickle.pgt_sharded_tables, pgtrickle.pgt_shards, pgtrickle.pgt_consumers, pgtrickle.pgt_foreign_functions,
    pgtrickle.pgt_identity, pgtrickle.pgt_verifications,
    pgtrickle.pgt_visible_stream_tables, pgtrickle.pgt_visible_history, pgtrickle.pgt_visible_jobs,
    pgtrickle.pgt_visible_events,
    pgtrickle.pgt_usable_databases, pgtrickle.pgt_own_requests, pgtrickle.pg_stat_stream_tables,
    pgtrickle.server_worker_inventory,
    pgtrickle.citus_status, pgtrickle.st_locks TO PUBLIC;
-- Everything except messages and queries.
GRANT SELECT (pgt_id, pgt_schema, pgt_name, pgt_relid, view_relid, schedule, refresh_mode, effective_mode, status,
              key_columns, frontier,
    data_timestamp, st_placement, placement, pooler_compatibility_mode, session_settings, consecutive_errors,
    created_at, updated_at,
    data_version, fencing_token, apply_xid, claimed_by, every, next_due, stretch, polled, tier, last_change_at,
    last_seconds, full_seconds,
    row_seconds, fuse_ceiling, fuse_blown_at, fuse_passes, refresh_group, own_seconds, lost_members,
    output_distribution_column,
    through_coordinator, counted_errors, error_kind, failed_at, alerted) ON pgtrickle.pgt_stream_tables TO PUBLIC;
GRANT SELECT (refresh_id, pgt_id, pgt_schema, pgt_name, start_time, end_time, status, action, initiated_by, rows_in,
              rows_inserted, rows_updated,
    rows_deleted, phases, sqlstate, frontier, kind) ON pgtrickle.pgt_refresh_history TO PUBLIC;
GRANT SELECT, UPDATE (action, arguments) ON pgtrickle.gate TO PUBLIC;

-- What everybody may call: functions without a leading underscore, and those that they call with their caller's
-- rights. The SECURITY DEFINER functions among them only read status, or clean up what nobody uses.
CREATE OR REPLACE FUNCTION pgtrickle._callable_by_everybody() RETURNS SETOF name
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT unnest(ARRAY[
        -- Identity
        '_gate', '_acts_for', '_is_administrator', '_may_see', '_require_administrator', '_redacted',
        -- Settings and status, with their owner's rights
        '_setting', '_setting_sources', '_effective_setting', '_service_role', '_freshness', '_late_stream_tables',
        '_service_state', '_job_status',
        '_buffer_sizes', '_node_report', '_followed_nodes', '_not_served', '_capture_signature', '_shard_capture_spec',
        '_is_read_from_nodes', '_is_stand_in',
        '_is_database_set', '_is_registered', '_set_members', '_registered_databases', '_source_databases',
        '_query_tokens', '_unread_node',
        '_warn_without_service',
        -- Clean-up, with their owner's rights
        '_forget_dropped', '_untrack_unused', '_resume_stopped',
        -- Trigger functions, which can only be attached
        '_guard', '_refuse_stand_in',
        -- Everything else acts with the rights of its caller
        '_alter', '_attach', '_attach_local_triggers', '_attach_shards', '_attach_sources', '_attach_triggers',
        '_await', '_base_type', '_resolved_sources',
        '_buffer_type', '_can_capture', '_capture_kind', '_capture_problems', '_local_capture_targets',
        '_changes_query', '_check_options', '_check_polled',
        '_check_query', '_check_trigger_rights', '_check_database_use', '_choose_st_placement', '_citus_group',
        '_citus_nodes', '_citus_placement', '_citus_status',
        '_column_names', '_columns_renamed', '_create', '_create_capture_trigger', '_create_shard_trigger',
        '_create_storage',
        '_default_collation', '_definition', '_descends', '_describe_functions', '_describe_table',
        '_distribution_column', '_drop', '_database_dsn',
        '_parse_duration', '_restore_ddl_settings', '_error_remedy', '_find_id', '_find_key', '_align_node_capture',
        '_align_shard_capture', '_three_part_names', '_former_row_id', '_function_conflicts',
        '_functions_used', '_require_id', '_has_citus', '_is_gone', '_is_trusted_role', '_vacuum_blockers',
        '_hidden_sources', '_inert_body', '_is_citus_source',
        '_is_distributed', '_is_read_through_coordinator', '_disable_ddl_propagation', '_primary_key',
        '_known_settings', '_enum_labels', '_like_pattern', '_is_set_member', '_refuse_database_use',
        '_localized_query',
        '_lock_holders', '_lock_source', '_milliseconds', '_current_names', '_database_identity', '_node_name',
        '_normal_value', '_node_capture_problem',
        '_user_objects', '_owner_function', '_owner_functions', '_owner_functions_ddl', '_are_owner_functions_current',
        '_are_owner_functions_earlier', '_make_owner_functions', '_ownership_problem', '_parse_name',
        '_distribute_stream_table',
        '_foreign_table_target', '_privilege_problem', '_health_problems', '_refresh_payload', '_refresh_stats',
        '_replace', '_replace_query', '_request',
        '_request_state', '_retrack', '_row_id', '_row_security_applies', '_local_rows_query', '_view_rules',
        '_runs_user_code', '_locate_table', '_enable_ddl_propagation',
        '_session_settings', '_setting_remedy', '_column_list', '_shard_capture_body', '_local_shard_spec',
        '_local_shards', '_shard_hash_column',
        '_signal_dag_rebuild', '_sources', '_stable_name', '_staleness', '_stored_columns', '_untrusted_owner',
        '_untrusted_type_owner', '_table_key', '_tier', '_time_dependent', '_partition_tree', '_partition_tree_state',
        '_column_types_clause', '_template', '_fill_template',
        '_untrusted_cast', '_upstream_ids', '_without_row_ids', '_notify_services', '_warn_time_dependent',
        '_id_with_readers', '_write_view', '_rewrite_state']::name[])
$$;

-- What the service and administrators may call as well.
CREATE OR REPLACE FUNCTION pgtrickle._callable_by_administrators() RETURNS SETOF name
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT unnest(ARRAY[
        '_administer', '_set', '_pause', '_stop_capture', '_update_intervals', '_emit_event', '_purge',
        '_drop_foreign_changes', '_has_pending_changes',
        '_check_commit', '_make_state', '_grant_state', '_renew_owner_functions', '_end_renewal',
        '_register_database', '_remove_database', '_register_set', '_remove_set', '_record_set_problem',
        '_register_node',
        '_forget_nodes', '_unused_nodes', '_outdated_distributed_tables', '_record_placements', '_follow_placements',
        '_groups_issued', '_last_placement_id',
        '_consumer_sources', '_poll_consumers', '_incarnation', '_store_proof', '_keep_consumers',
        '_reset_copied_database', '_subscribe', '_database_use_problems', '_elect_broker',
        '_register_interest']::name[])
$$;

DO $$
DECLARE
    found record;
BEGIN
    -- Default privileges of the installing role may have granted rights to others.
    FOR found IN SELECT DISTINCT n.nspname, a.grantee::regrole AS role
                 FROM (SELECT c.relnamespace, a.grantee FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
                       WHERE a.grantee NOT IN (0, c.relowner)
                       UNION ALL
                       SELECT p.pronamespace, a.grantee FROM pg_proc AS p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
                       WHERE a.grantee NOT IN (0, p.proowner)
                      ) AS a (namespace, grantee)
                 JOIN pg_namespace AS n ON n.oid = a.namespace AND n.nspname IN ('pgtrickle', 'pgtrickle_changes')
                 JOIN pg_roles AS r ON r.oid = a.grantee AND r.rolname <> 'pg_database_owner'
                 WHERE r.rolname IS DISTINCT FROM pgtrickle._service_role() LOOP
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA %I FROM %s', found.nspname, found.role);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA %I FROM %s', found.nspname, found.role);
        IF found.nspname = 'pgtrickle' THEN -- capture functions are for roles that may attach them
            EXECUTE format('REVOKE ALL ON ALL ROUTINES IN SCHEMA pgtrickle FROM %s', found.role);
        END IF;
    END LOOP;
    FOR found IN SELECT p.oid::regprocedure AS function, p.proname AS name FROM pg_proc AS p
        WHERE p.pronamespace = 'pgtrickle'::regnamespace LOOP
        EXECUTE format('REVOKE ALL ON ROUTINE %s FROM PUBLIC', found.function);
        IF found.name NOT LIKE '\_%' OR found.name IN (SELECT pgtrickle._callable_by_everybody()) THEN
            EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO PUBLIC', found.function);
        ELSIF found.name IN (SELECT pgtrickle._callable_by_administrators()) THEN
            EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO pg_database_owner', found.function);
        END IF;
    END LOOP;
END
$$;

-- A backslash in a string means the same whatever the session has set. Under standard_conforming_strings = off, the
-- patterns in these functions would match something else, and the first call of a function in a session decides how it
-- is parsed for all later calls there, including those of the service.
DO $$
DECLARE
    found regprocedure;
BEGIN
    FOR found IN
        SELECT p.oid FROM pg_proc AS p
        WHERE p.pronamespace = 'pgtrickle'::regnamespace AND strpos(p.prosrc, E'\\') > 0
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET standard_conforming_strings = on', found);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._grant_to_service(service name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former name := pgtrickle._service_role();
    found regprocedure;
BEGIN
    IF former IS NOT NULL AND former <> service AND former <> current_user
       AND to_regrole(quote_ident(former)) IS NOT NULL THEN
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA pgtrickle, pgtrickle_changes FROM %I', former);
        EXECUTE format('REVOKE ALL ON ALL ROUTINES IN SCHEMA pgtrickle FROM %I', former);
        EXECUTE format('REVOKE CREATE ON SCHEMA pgtrickle_views FROM %I', former);
    END IF;
    IF service <> current_user THEN -- the owner has all privileges and must keep them
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgtrickle TO %I', service);
        EXECUTE format('REVOKE INSERT, UPDATE, DELETE ON pgtrickle.pgt_schema_version FROM %I', service);
        EXECUTE format('GRANT SELECT, DELETE ON ALL TABLES IN SCHEMA pgtrickle_changes TO %I', service);
        EXECUTE format('GRANT UPDATE (waiting_since) ON pgtrickle_changes.pgt_activity TO %I', service);
        EXECUTE format('GRANT CREATE ON SCHEMA pgtrickle_views TO %I', service);
        FOR found IN SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = 'pgtrickle'::regnamespace
                     AND p.proname IN (SELECT pgtrickle._callable_by_administrators()) LOOP
            EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %I', found, service);
        END LOOP;
    END IF;
    INSERT INTO pgtrickle.pgt_settings AS p (name, value) VALUES ('service_role', service)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, set_at = now(), set_by = excluded.set_by
        WHERE p.value <> excluded.value;
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._grant_to_service(name) FROM PUBLIC;
