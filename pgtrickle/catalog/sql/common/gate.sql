-- The gate: how roles other than administrators request actions that only the owner of the catalog can perform.
-- `UPDATE pgtrickle.gate` names an action and its arguments. The view puts the caller into the old row, so it is the
-- current_user that PostgreSQL knows: the role that runs the UPDATE, or inside a SECURITY DEFINER function that
-- function's owner. Nobody can act as another role.

CREATE OR REPLACE VIEW pgtrickle.gate AS
SELECT current_user AS caller, NULL::text AS action, NULL::jsonb AS arguments, NULL::jsonb AS result;
COMMENT ON VIEW pgtrickle.gate IS 'Internal: runs a request with the role that made it.';

CREATE OR REPLACE FUNCTION pgtrickle._pass_gate() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET standard_conforming_strings = on SET client_min_messages = warning
AS $$
DECLARE
    caller CONSTANT name := OLD.caller;
    a CONSTANT jsonb := coalesce(NEW.arguments, '{}');
    id CONSTANT bigint := a ->> 'id';
    source CONSTANT regclass := (a ->> 'source')::oid;
    columns CONSTANT smallint[] := ARRAY(SELECT jsonb_array_elements_text(nullif(a -> 'columns', 'null'))::smallint);
BEGIN
    -- Capture
    IF NEW.action = 'is_captured' THEN
        NEW.result := to_jsonb(pgtrickle._is_captured(caller, source, columns));
    ELSIF NEW.action = 'grant_capture' THEN
        PERFORM pgtrickle._grant_capture(caller, source);
    ELSIF NEW.action = 'track' THEN
        NEW.result := to_jsonb(ARRAY[pgtrickle._track(caller, source, columns)]);
    ELSIF NEW.action = 'untrack_unused' THEN
        NEW.result := coalesce((SELECT jsonb_agg(u::oid::text) FROM pgtrickle._untrack(caller) AS u), '[]');
    ELSIF NEW.action = 'track_shards' THEN
        PERFORM pgtrickle._track_shards(caller, source, a -> 'definition');
    ELSIF NEW.action = 'mark_gap' THEN
        PERFORM pgtrickle._mark_gap(caller, source, a ->> 'stable_name');
    ELSIF NEW.action = 'read_from_nodes' THEN
        PERFORM pgtrickle._read_from_nodes(caller, source);
    -- Stream tables
    ELSIF NEW.action = 'begin_create' THEN
        PERFORM pgtrickle._open_views(caller);
        NEW.result := to_jsonb(pgtrickle._next_id());
    ELSIF NEW.action = 'begin_alter' THEN
        PERFORM pgtrickle._require_owner(caller, id, 'alter');
        PERFORM pgtrickle._open_views(caller);
    ELSIF NEW.action = 'lock_for_drop' THEN
        PERFORM pgtrickle._lock_for_drop(caller, ARRAY(SELECT jsonb_array_elements_text(a -> 'ids')::bigint));
    ELSIF NEW.action = 'register' THEN
        PERFORM pgtrickle._check_options(a ->> 'schedule', a ->> 'refresh_mode', a ->> 'placement');
        PERFORM pgtrickle._register(
            caller, id, (a ->> 'storage')::oid::regclass, (a ->> 'view')::oid::regclass, a ->> 'query',
            a ->> 'schedule', a ->> 'refresh_mode',
            (a ->> 'pooler_compatibility_mode')::boolean, a ->> 'placement',
            CASE WHEN a -> 'key_columns' <> 'null' THEN ARRAY(SELECT jsonb_array_elements_text(a -> 'key_columns'))
                 END,
            pgtrickle._known_session_settings(a -> 'session_settings'));
    ELSIF NEW.action = 'update' THEN
        PERFORM pgtrickle._check_options(a ->> 'schedule', a ->> 'refresh_mode', a ->> 'placement', a ->> 'status',
                                         a ->> 'tier',
                                         (a ->> 'fuse_ceiling')::bigint, a ->> 'lost_members');
        PERFORM pgtrickle._update_stream_table(
            caller, id, a ->> 'query', a ->> 'schedule', a ->> 'refresh_mode',
            a ->> 'status', (a ->> 'pooler_compatibility_mode')::boolean,
            a ->> 'placement', pgtrickle._known_session_settings(nullif(a -> 'session_settings', 'null')),
            a ->> 'tier', (a ->> 'fuse_ceiling')::bigint, a ->> 'lost_members');
    ELSIF NEW.action = 'record_mode' THEN
        PERFORM pgtrickle._record_mode(caller, id, a ->> 'mode', a ->> 'reason');
    ELSIF NEW.action = 'record_coordinator' THEN
        PERFORM pgtrickle._record_coordinator(caller, id);
    ELSIF NEW.action = 'record_st_placement' THEN
        PERFORM pgtrickle._record_st_placement(caller, id, a ->> 'placement', a ->> 'column');
    ELSIF NEW.action = 'create_group' THEN
        PERFORM pgtrickle._create_group(caller, a ->> 'name',
                                        ARRAY(SELECT jsonb_array_elements_text(a -> 'ids')::bigint));
    ELSIF NEW.action = 'drop_group' THEN
        PERFORM pgtrickle._drop_group(caller, a ->> 'name');
    ELSIF NEW.action = 'reset_fuse' THEN
        PERFORM pgtrickle._reset_fuse(caller, id, a ->> 'action');
    -- Requests
    ELSIF NEW.action = 'request' THEN
        NEW.result := to_jsonb(pgtrickle._file_request(caller, id, a ->> 'key', coalesce(a ->> 'kind', 'REFRESH')));
    ELSIF NEW.action = 'ask_for_changes' THEN
        NEW.result := to_jsonb(pgtrickle._ask_for_changes(caller, (a ->> 'reader')::bigint, id));
    -- Other databases
    ELSIF NEW.action = 'import_table' THEN
        PERFORM pgtrickle._import_table(caller, a ->> 'database', a -> 'definition');
    ELSIF NEW.action = 'import_set_table' THEN
        PERFORM pgtrickle._import_set_table(caller, a ->> 'database_set', a ->> 'schema', a ->> 'name',
                                            ARRAY(SELECT jsonb_array_elements_text(a -> 'members')));
    ELSIF NEW.action = 'resolve_foreign_table' THEN
        PERFORM pgtrickle._resolve_foreign_table(caller, source, a ->> 'database', a -> 'definition');
    ELSIF NEW.action = 'record_functions' THEN
        PERFORM pgtrickle._record_functions(
            caller, a ->> 'database', ARRAY(SELECT jsonb_array_elements_text(a -> 'functions')),
            ARRAY(SELECT jsonb_array_elements_text(a -> 'definitions')),
                ARRAY(SELECT jsonb_array_elements_text(a -> 'problems')));
    ELSE
        RAISE EXCEPTION 'unknown gate action %', quote_nullable(NEW.action)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN NEW;
END
$$;
CREATE OR REPLACE TRIGGER pgtrickle_pass INSTEAD OF UPDATE ON pgtrickle.gate FOR EACH ROW EXECUTE FUNCTION
    pgtrickle._pass_gate();

CREATE OR REPLACE FUNCTION pgtrickle._gate(action text, arguments jsonb) RETURNS jsonb
LANGUAGE sql
AS $$
    UPDATE pgtrickle.gate AS g SET action = _gate.action, arguments = _gate.arguments RETURNING g.result
$$;
