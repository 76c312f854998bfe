-- The gate: how everybody but administrators has something done that only the catalog's owner can do. `UPDATE pgtrickle.gate` names an action and its
-- arguments. The caller in the old row is made by the view, so it is current_user as PostgreSQL knows it: of whoever runs the UPDATE, which inside a
-- SECURITY DEFINER function is that function's owner. Nobody can pass as somebody else.

CREATE OR REPLACE VIEW pgtrickle.gate AS
SELECT current_user AS caller, NULL::text AS action, NULL::jsonb AS arguments, NULL::jsonb AS result;
COMMENT ON VIEW pgtrickle.gate IS 'Internal: runs a request with the role that made it.';

CREATE OR REPLACE FUNCTION pgtrickle._pass_gate() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on SET client_min_messages = warning
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
    ELSIF NEW.action = 'spread' THEN
        PERFORM pgtrickle._spread(caller, source);
    -- Stream tables
    ELSIF NEW.action = 'begin' THEN
        PERFORM pgtrickle._open_views(caller);
        NEW.result := to_jsonb(pgtrickle._new_id());
    ELSIF NEW.action = 'open' THEN
        PERFORM pgtrickle._require_owner(caller, id, 'alter');
        PERFORM pgtrickle._open_views(caller);
    ELSIF NEW.action = 'begin_drop' THEN
        PERFORM pgtrickle._begin_drop(caller, ARRAY(SELECT jsonb_array_elements_text(a -> 'ids')::bigint));
    ELSIF NEW.action = 'register' THEN
        PERFORM pgtrickle._check_options(a ->> 'schedule', a ->> 'refresh_mode', a ->> 'placement');
        PERFORM pgtrickle._register(
            caller, id, (a ->> 'storage')::oid::regclass, (a ->> 'view')::oid::regclass, a ->> 'query', a ->> 'schedule', a ->> 'refresh_mode',
            (a ->> 'pooler_compatibility_mode')::boolean, a ->> 'placement',
            CASE WHEN a -> 'key_columns' <> 'null' THEN ARRAY(SELECT jsonb_array_elements_text(a -> 'key_columns')) END,
            pgtrickle._known_session_settings(a -> 'session_settings'));
    ELSIF NEW.action = 'change' THEN
        PERFORM pgtrickle._check_options(a ->> 'schedule', a ->> 'refresh_mode', a ->> 'placement', a ->> 'status', a ->> 'tier',
                                         (a ->> 'fuse_ceiling')::bigint, a ->> 'lost_members');
        PERFORM pgtrickle._change(
            caller, id, a ->> 'query', a ->> 'schedule', a ->> 'refresh_mode', a ->> 'status', (a ->> 'pooler_compatibility_mode')::boolean,
            a ->> 'placement', pgtrickle._known_session_settings(nullif(a -> 'session_settings', 'null')), a ->> 'tier', (a ->> 'fuse_ceiling')::bigint, a ->> 'lost_members');
    ELSIF NEW.action = 'note_mode' THEN
        PERFORM pgtrickle._note_mode(caller, id, a ->> 'mode', a ->> 'reason');
    ELSIF NEW.action = 'note_coordinator' THEN
        PERFORM pgtrickle._note_coordinator(caller, id);
    ELSIF NEW.action = 'note_placement' THEN
        PERFORM pgtrickle._note_placement(caller, id, a ->> 'placement', a ->> 'column');
    ELSIF NEW.action = 'group' THEN
        PERFORM pgtrickle._group(caller, a ->> 'name', ARRAY(SELECT jsonb_array_elements_text(a -> 'ids')::bigint));
    ELSIF NEW.action = 'ungroup' THEN
        PERFORM pgtrickle._ungroup(caller, a ->> 'name');
    ELSIF NEW.action = 'reset_fuse' THEN
        PERFORM pgtrickle._reset_fuse(caller, id, a ->> 'action');
    -- Requests
    ELSIF NEW.action = 'request' THEN
        NEW.result := to_jsonb(pgtrickle._file_request(caller, id, a ->> 'key', coalesce(a ->> 'kind', 'REFRESH')));
    ELSIF NEW.action = 'ask_for_changes' THEN
        NEW.result := to_jsonb(pgtrickle._ask_for_changes(caller, (a ->> 'reader')::bigint, id));
    -- Other databases
    ELSIF NEW.action = 'stand_in' THEN
        PERFORM pgtrickle._stand_in(caller, a ->> 'database', a -> 'definition');
    ELSIF NEW.action = 'stand_in_for_all' THEN
        PERFORM pgtrickle._stand_in_for_all(caller, a ->> 'database_set', a ->> 'schema', a ->> 'name',
                                            ARRAY(SELECT jsonb_array_elements_text(a -> 'members')));
    ELSIF NEW.action = 'resolve' THEN
        PERFORM pgtrickle._resolve(caller, source, a ->> 'database', a -> 'definition');
    ELSIF NEW.action = 'note_functions' THEN
        PERFORM pgtrickle._note_functions(
            caller, a ->> 'database', ARRAY(SELECT jsonb_array_elements_text(a -> 'functions')),
            ARRAY(SELECT jsonb_array_elements_text(a -> 'definitions')), ARRAY(SELECT jsonb_array_elements_text(a -> 'problems')));
    ELSE
        RAISE EXCEPTION 'the gate knows no action %', quote_nullable(NEW.action) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN NEW;
END
$$;
CREATE OR REPLACE TRIGGER pgtrickle_pass INSTEAD OF UPDATE ON pgtrickle.gate FOR EACH ROW EXECUTE FUNCTION pgtrickle._pass_gate();

CREATE OR REPLACE FUNCTION pgtrickle._gate(action text, arguments jsonb) RETURNS jsonb
LANGUAGE sql
AS $$
    UPDATE pgtrickle.gate AS g SET action = _gate.action, arguments = _gate.arguments RETURNING g.result
$$;
