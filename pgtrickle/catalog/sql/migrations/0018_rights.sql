-- PostgreSQL itself decides on privileges (decision 019): functions that asked for their caller are removed, owners
-- have no privileges on change buffers, and only administrators create objects in pgtrickle's schemas.

-- Rows to lock for mutual exclusion. Any role can take advisory locks.
CREATE TABLE pgtrickle.pgt_locks (name text PRIMARY KEY);
COMMENT ON TABLE pgtrickle.pgt_locks IS 'Rows to lock: one for each thing that only one transaction at a time may do.';

-- Roles that are creating a stream table in this transaction, and may therefore create objects in pgtrickle_views
-- until its end.
CREATE TABLE pgtrickle.pgt_openings (role oid PRIMARY KEY);
COMMENT ON TABLE pgtrickle.pgt_openings IS 'Always empty for other transactions than the one '
                                           'that creates a stream table.';

-- Functions that took their caller's identity from the session.
DROP FUNCTION IF EXISTS pgtrickle._is_captured(regclass, smallint[]);
DROP FUNCTION IF EXISTS pgtrickle._track(regclass, smallint[]);
DROP FUNCTION IF EXISTS pgtrickle._track_shards(regclass, jsonb);
DROP FUNCTION IF EXISTS pgtrickle._mark_gap(regclass, text);
DROP FUNCTION IF EXISTS pgtrickle._require_trigger_right(regclass);
DROP FUNCTION IF EXISTS pgtrickle._require_owner(regclass, text);
DROP FUNCTION IF EXISTS pgtrickle._require_use(text);
DROP FUNCTION IF EXISTS pgtrickle._users_of(text);
DROP FUNCTION IF EXISTS pgtrickle._usable_databases();
DROP FUNCTION IF EXISTS pgtrickle._new_id();
DROP FUNCTION IF EXISTS pgtrickle._register(bigint, regclass, regclass, text, text, text, boolean, text, text[],
                                            jsonb);
DROP FUNCTION IF EXISTS pgtrickle._change(bigint, text, text, text, text, boolean, text, jsonb, text, bigint, text);
DROP FUNCTION IF EXISTS pgtrickle._file_request(bigint, text);
DROP FUNCTION IF EXISTS pgtrickle._group(text, bigint[]);
DROP FUNCTION IF EXISTS pgtrickle._reset_fuse(bigint, text);
DROP FUNCTION IF EXISTS pgtrickle._note_mode(bigint, text, text);
DROP FUNCTION IF EXISTS pgtrickle._note_placement(bigint, text, text);
DROP FUNCTION IF EXISTS pgtrickle._note_coordinator(bigint);
DROP FUNCTION IF EXISTS pgtrickle._ask_for_changes(bigint, bigint);
DROP FUNCTION IF EXISTS pgtrickle._stand_in(text, jsonb);
DROP FUNCTION IF EXISTS pgtrickle._stand_in_for_all(text, text, text, text[]);
DROP FUNCTION IF EXISTS pgtrickle._resolve(regclass, text, jsonb);
DROP FUNCTION IF EXISTS pgtrickle._note_functions(text, text[], text[], text[]);
DROP FUNCTION IF EXISTS pgtrickle._spread(regclass);
DROP FUNCTION IF EXISTS pgtrickle._grant_buffers(bigint);
DROP FUNCTION IF EXISTS pgtrickle._register_database(text, text, text, text[]);
DROP FUNCTION IF EXISTS pgtrickle._register_set(text, text, text[], text, text[]);
DROP FUNCTION IF EXISTS pgtrickle._register_node(integer, text, text);
DROP FUNCTION IF EXISTS pgtrickle._create_owner_functions(bigint);
DROP FUNCTION IF EXISTS pgtrickle._refresh_payload(pgtrickle.pgt_refresh_history);
DROP FUNCTION IF EXISTS pgtrickle._shard_definition(regclass, jsonb);
DROP FUNCTION IF EXISTS pgtrickle._known_nodes();
DROP FUNCTION IF EXISTS pgtrickle._settle_schedules();
DROP FUNCTION IF EXISTS pgtrickle._caller();

-- Permanent privileges on change buffers that owners of stream tables had.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT DISTINCT a.attrelid::regclass AS buffer, x.grantee::regrole AS role
        FROM pgtrickle.pgt_change_tracking AS t
        JOIN pg_inherits AS i ON i.inhparent = t.buffer_relid OR i.inhrelid = t.buffer_relid
        JOIN pg_attribute AS a ON a.attrelid IN (t.buffer_relid, i.inhrelid)
        JOIN pg_class AS c ON c.oid = a.attrelid
        CROSS JOIN LATERAL aclexplode(a.attacl) AS x WHERE x.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', granted.buffer, granted.role);
    END LOOP;
END
$$;
