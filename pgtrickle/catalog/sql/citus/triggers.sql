-- Buffers and triggers of tables that Citus manages, created on every node and kept up to date.

-- Whether columns of a table captured by name have been renamed. If two columns swap names, no name is missing.
CREATE OR REPLACE FUNCTION pgtrickle._columns_renamed(source regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t
                   CROSS JOIN LATERAL jsonb_each_text(t.captured_as) AS c
                   JOIN pg_attribute AS a ON a.attrelid = source AND a.attnum = c.key::smallint
                   WHERE t.source_relid = source AND a.attname <> c.value)
$$;

-- Creates or updates the buffer and the capture function on this node. Columns are not removed from the buffer: older
-- changes may still be read.
CREATE OR REPLACE FUNCTION pgtrickle._track_shards(caller name, source regclass, said jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    definition jsonb := pgtrickle._local_shard_spec(caller, source, said);
    stable_name text := definition ->> 'stable_name';
    buffer regclass;
    col jsonb;
    has text;
BEGIN
    PERFORM pgtrickle._require_trigger_right(caller, source);
    PERFORM pgtrickle._lock('track ' || source::oid);
    -- Citus re-creates a table to distribute it differently. Its triggers remain, and so does what belongs to them.
    UPDATE pgtrickle.pgt_change_tracking AS t SET source_relid = source
    WHERE t.source_stable_name = stable_name AND t.capture_kind = 'shards' AND t.source_relid <> source
      AND pgtrickle._is_gone(t.source_relid);
    IF FOUND THEN
        PERFORM pgtrickle._mark(stable_name, 'SCHEMA');
        UPDATE pgtrickle.pgt_consumers AS c SET source_relid = source WHERE c.source_stable_name = stable_name;
    ELSIF NOT EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source) THEN
        PERFORM pgtrickle._begin_tracking(source, 'shards', stable_name);
    ELSIF EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t
                  WHERE t.source_relid = source AND t.capture_kind = 'row') THEN
        PERFORM pgtrickle._drop_capture_function(stable_name); -- with its triggers, which partitions have copies of
    END IF;
    IF pgtrickle._columns_renamed(source) THEN
        PERFORM pgtrickle._mark(stable_name, 'SCHEMA'); -- what was stored since may be a neighbour's
    END IF;
    buffer := format('pgtrickle_changes.%I', 'changes_' || stable_name)::regclass;
    FOR col IN SELECT jsonb_array_elements(definition -> 'columns') LOOP
        has := (SELECT pgtrickle._buffer_type(buffer, a.attnum) FROM pg_attribute AS a
                WHERE a.attrelid = buffer AND a.attname = 'c' || (col ->> 'attnum') AND NOT a.attisdropped);
        CONTINUE WHEN has = col ->> 'stored';
        IF has IS NOT NULL THEN
            EXECUTE format('ALTER TABLE %s DROP COLUMN c%s', buffer, col ->> 'attnum');
            PERFORM pgtrickle._mark(stable_name, 'SCHEMA');
        END IF;
        EXECUTE format('ALTER TABLE %s ADD COLUMN c%s %s', buffer, col ->> 'attnum', col ->> 'stored');
    END LOOP;
    PERFORM pgtrickle._protect(part) FROM pgtrickle._partition_tree(buffer) AS part;
    PERFORM pgtrickle._write_capture_function(stable_name, pgtrickle._shard_capture_body(definition));
    UPDATE pgtrickle.pgt_change_tracking AS t
    SET capture_kind = 'shards',
        captured_as = (SELECT jsonb_object_agg(a.attnum, a.attname) FROM pg_attribute AS a
                       WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped),
        tracked_columns = ARRAY(SELECT (c ->> 'attnum')::smallint
                                FROM jsonb_array_elements(definition -> 'columns') AS c ORDER BY 1)
    WHERE t.source_relid = source;
    PERFORM pgtrickle._grant_capture(caller, source);
END
$$;

-- The tables that can be written to on this node: the shards of a table and of its partitions, or these tables
-- themselves.
CREATE OR REPLACE FUNCTION pgtrickle._local_capture_targets(source regclass)
RETURNS TABLE (relation regclass, suffix text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pgtrickle._citus_placement(source) = 'local' THEN
        RETURN QUERY SELECT member::regclass, '' FROM pgtrickle._partition_tree(source) AS member;
    ELSE
        RETURN QUERY
        SELECT h.shard, '_' || h.shardid
        FROM (SELECT to_regclass(shard_name(s.logicalrelid, s.shardid, false)) AS shard, s.shardid
              FROM pg_dist_shard AS s JOIN pg_dist_placement AS p USING (shardid)
              WHERE s.logicalrelid IN (SELECT pgtrickle._partition_tree(source)) AND p.shardstate = 1
                AND p.groupid = (SELECT g.groupid FROM pg_dist_local_group AS g) OFFSET 0) AS h
        WHERE h.shard IS NOT NULL;
    END IF;
END
$$;

-- One of the four capture triggers, of a table or of a shard. The names of a shard's triggers end with its number.
-- Triggers of partitions have an argument.
CREATE OR REPLACE FUNCTION pgtrickle._create_shard_trigger(relation regclass, operation text, stable_name text,
                                                           suffix text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER %s ON %s %s FOR EACH STATEMENT EXECUTE '
                   'FUNCTION pgtrickle_changes.%I(%s)',
        format('pgtrickle_capture_%s_%s%s', lower(operation), stable_name, suffix), operation, relation,
        CASE operation WHEN 'INSERT' THEN 'REFERENCING NEW TABLE AS __pgt_new'
                       WHEN 'UPDATE' THEN 'REFERENCING OLD TABLE AS __pgt_old NEW TABLE AS __pgt_new'
                       WHEN 'DELETE' THEN 'REFERENCING OLD TABLE AS __pgt_old' END,
        'capture_' || stable_name,
        CASE WHEN (SELECT c.relispartition FROM pg_class AS c WHERE c.oid = relation) THEN '''partition''' END);
END
$$;

-- Creates missing triggers on this node: Citus creates those for TRUNCATE on shards that move, not on existing ones;
-- and a user may have disabled one. Replacing a trigger waits for the writers of its table, and keeps new ones out
-- until the end of the transaction.
CREATE OR REPLACE FUNCTION pgtrickle._attach_local_triggers(source regclass, stable_name text, lock_out boolean)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted record;
    covered boolean := false;
BEGIN
    FOR wanted IN
        SELECT h.relation, h.suffix, o.operation, t.oid IS NULL AS lacks
        FROM pgtrickle._local_capture_targets(source) AS h
        CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS o (operation)
        LEFT JOIN pg_trigger AS t ON t.tgrelid = h.relation AND t.tgenabled = 'O'
            AND t.tgname = format('pgtrickle_capture_%s_%s%s', lower(o.operation), stable_name, h.suffix)
        WHERE t.oid IS NULL OR lock_out AND o.operation = 'TRUNCATE'
        ORDER BY h.relation::oid, o.operation
    LOOP
        PERFORM pgtrickle._create_shard_trigger(wanted.relation, wanted.operation, stable_name, wanted.suffix);
        IF wanted.lacks THEN
            PERFORM pgtrickle._gate('mark_gap', jsonb_build_object('source', source::oid, 'stable_name', stable_name));
            covered := covered OR pg_partition_root(wanted.relation) <> wanted.relation;
        END IF;
    END LOOP;
    IF covered THEN -- makes writers plan again that have cached the previous answer
        PERFORM pgtrickle._create_shard_trigger(h.relation, 'TRUNCATE', stable_name, h.suffix)
        FROM pgtrickle._local_capture_targets(source) AS h
        WHERE pg_partition_root(h.relation) = h.relation;
    END IF;
END
$$;

-- Makes readers of a table re-initialize, because it is not known how long a trigger was missing.
CREATE OR REPLACE FUNCTION pgtrickle._mark_gap(caller name, source regclass, stable_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_trigger_right(caller, source);
    PERFORM pgtrickle._mark(t.source_stable_name, 'GAP') FROM pgtrickle.pgt_change_tracking AS t
    WHERE t.source_relid = source AND t.source_stable_name = stable_name;
END
$$;

-- Updates capture on this node, except for the triggers that Citus creates. Writers that began with another text of
-- the function must have ended before rows are read: they store what that text says.
CREATE OR REPLACE FUNCTION pgtrickle._align_shard_capture(said jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    source regclass := (said ->> 'name')::regclass;
    definition jsonb := pgtrickle._local_shard_spec(current_user, source, said);
    capture regprocedure := to_regprocedure(format('pgtrickle_changes.capture_%s()', definition ->> 'stable_name'));
    attached boolean;
    former text := current_setting('lock_timeout');
    timeout text := pgtrickle._setting('lock_timeout_ms') || 'ms';
BEGIN
    PERFORM pgtrickle._disable_ddl_propagation(), set_config('lock_timeout', timeout, true);
    attached := EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = source AND t.tgfoid = capture)
                -- row triggers, which will be dropped
                AND NOT EXISTS (SELECT FROM pg_trigger AS t
                                WHERE t.tgrelid = source AND t.tgfoid = capture AND t.tgtype & 1 = 1);
    IF attached THEN
        PERFORM pgtrickle._gate('grant_capture', jsonb_build_object('source', source::oid));
    END IF;
    IF attached AND pgtrickle._shard_capture_body(definition) <> (SELECT p.prosrc FROM pg_proc AS p
                                                                  WHERE p.oid = capture) THEN
        PERFORM pgtrickle._attach_local_triggers(source, definition ->> 'stable_name', true);
    END IF;
    PERFORM pgtrickle._gate('track_shards', jsonb_build_object('source', source::oid, 'definition', definition));
    IF attached THEN
        PERFORM pgtrickle._attach_local_triggers(source, definition ->> 'stable_name', false);
    END IF;
    PERFORM set_config('lock_timeout', former, true);
EXCEPTION WHEN lock_not_available THEN
    RAISE EXCEPTION 'could not lock % within %', source, timeout
        USING ERRCODE = 'lock_not_available',
              HINT = 'Try again when its writers have ended, or raise the setting lock_timeout_ms.';
END
$$;

-- Lets DDL propagate to the shards on all nodes, which wait for locks no longer than this transaction: Citus passes on
-- only what SET LOCAL sets. Returns the previous settings, for _restore_ddl_settings().
CREATE OR REPLACE FUNCTION pgtrickle._enable_ddl_propagation() RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former jsonb := (SELECT jsonb_object_agg(name, current_setting(name))
                     FROM unnest(ARRAY['lock_timeout', 'citus.enable_ddl_propagation', 'citus.enable_unsafe_triggers',
                                       'citus.propagate_set_commands']) AS name);
BEGIN
    PERFORM set_config('citus.enable_ddl_propagation', 'on', true),
        set_config('citus.enable_unsafe_triggers', 'on', true),
            set_config('citus.propagate_set_commands', 'local', true);
    EXECUTE format('SET LOCAL lock_timeout = %L', former ->> 'lock_timeout');
    RETURN former;
END
$$;

-- For the rest of the transaction the nodes have their own lock_timeout again, and all settings here are restored.
CREATE OR REPLACE FUNCTION pgtrickle._restore_ddl_settings(former jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    SET LOCAL lock_timeout TO DEFAULT;
    PERFORM set_config(s.key, s.value, true) FROM jsonb_each_text(former) AS s;
END
$$;

-- Creates the triggers, on the coordinator. Every node already has its buffer, or changes of its writers would be
-- lost.
CREATE OR REPLACE FUNCTION pgtrickle._attach_shards(source regclass) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    definition jsonb := pgtrickle._shard_capture_spec(source);
    stable_name text := definition ->> 'stable_name';
    former jsonb;
    wanted record;
    problem text[] := pgtrickle._node_capture_problem(source);
BEGIN
    IF pgtrickle._citus_group() <> 0 THEN
        RETURN stable_name; -- on a node, the coordinator has decided what to capture
    ELSIF problem IS NOT NULL THEN
        RAISE EXCEPTION 'changes of % cannot be captured: %', source, problem[1]
            USING ERRCODE = 'feature_not_supported', HINT = problem[2];
    ELSIF definition ->> 'placement' = 'reference' AND NOT EXISTS (SELECT FROM pgtrickle._local_shards(source)) THEN
        RAISE EXCEPTION 'changes of the reference table % cannot be captured: the coordinator has no copy of it',
                source
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'SELECT citus_set_coordinator_host(…) and SELECT replicate_reference_tables() give it one.';
    END IF;
    PERFORM pgtrickle._align_shard_capture(definition);
    IF pgtrickle._citus_placement(source) <> 'local' THEN
        former := pgtrickle._enable_ddl_propagation();
    END IF;
    FOR wanted IN
        SELECT member::regclass AS relation, o.operation FROM pgtrickle._partition_tree(source) AS member
        CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS o (operation)
        WHERE NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = member AND t.tgenabled = 'O'
                          AND t.tgname = format('pgtrickle_capture_%s_%s', lower(o.operation), stable_name))
        ORDER BY member, o.operation
    LOOP
        PERFORM pgtrickle._create_shard_trigger(wanted.relation, wanted.operation, stable_name, '');
    END LOOP;
    -- Triggers of a detached partition do nothing any more. pg_class does not show shards.
    FOR wanted IN
        SELECT t.tgrelid::regclass AS relation, t.tgname FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
        WHERE t.tgfoid = to_regprocedure('pgtrickle_changes.capture_' || stable_name || '()')
          AND t.tgrelid NOT IN (SELECT pgtrickle._partition_tree(source)) AND pg_has_role(c.relowner, 'USAGE')
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', wanted.tgname, wanted.relation);
    END LOOP;
    IF former IS NOT NULL THEN
        PERFORM pgtrickle._restore_ddl_settings(former);
    END IF;
    PERFORM pgtrickle._attach_local_triggers(source, stable_name, false);
    RETURN stable_name;
END
$$;

-- Also drops the triggers that call it. On a coordinator, it is dropped on all nodes.
CREATE OR REPLACE FUNCTION pgtrickle._drop_capture_function(stable_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    former jsonb;
BEGIN
    IF pgtrickle._has_citus() AND pgtrickle._citus_group() = 0
       AND EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t
                   WHERE t.source_stable_name = stable_name AND t.capture_kind = 'shards') THEN
        former := pgtrickle._enable_ddl_propagation();
    END IF;
    EXECUTE format('DROP FUNCTION IF EXISTS pgtrickle_changes.%I() CASCADE', 'capture_' || stable_name);
    IF former IS NOT NULL THEN
        PERFORM pgtrickle._restore_ddl_settings(former);
    END IF;
END
$$;

-- Changes when a table is distributed differently, and whenever _capture_signature() of other tables would change;
-- 'lacking' while a table written on this node lacks a trigger, or the coordinator has no copy of a reference table.
-- Shards may come and go: earlier changes are in the buffer of the node that they were on, and the changes of all
-- nodes together are those of the table.
CREATE OR REPLACE FUNCTION pgtrickle._shard_signature(source regclass, stable_name text) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    placement text := pgtrickle._citus_placement(source);
    capture regprocedure := to_regprocedure(format('pgtrickle_changes.capture_%s()', stable_name));
    tree oid[] := ARRAY(SELECT pgtrickle._partition_tree(source));
    written oid[] := ARRAY(SELECT h.relation::oid FROM pgtrickle._local_capture_targets(source) AS h);
BEGIN
    IF placement IN ('reference', 'citus_local') AND pgtrickle._citus_group() = 0 AND written = '{}'
       OR 4 > ANY (SELECT count(t.oid) FROM unnest(written) AS relation
                   LEFT JOIN pg_trigger AS t ON t.tgrelid = relation AND t.tgenabled = 'O' AND t.tgfoid = capture
                   GROUP BY relation) THEN
        RETURN 'lacking';
    ELSIF pgtrickle._columns_renamed(source) THEN
        RETURN 'renamed';
    END IF;
    RETURN pgtrickle.stable_hash(concat_ws('|', 'shards', placement,
        (SELECT p.prosrc = pgtrickle._inert_body() FROM pg_proc AS p WHERE p.oid = capture),
        -- Triggers for TRUNCATE are sometimes created again, to keep writers out.
        (SELECT string_agg(concat_ws(' ', t.tgrelid, t.tgname, t.xmin), ',' ORDER BY t.tgrelid, t.tgname)
         FROM pg_trigger AS t
         WHERE t.tgrelid = ANY (tree) AND t.tgfoid = capture
           AND t.tgname ~ '^pgtrickle_capture_(insert|update|delete)_'),
        pgtrickle._partition_tree_state(source, tree)));
END
$$;

-- The same on all other nodes, each in its own transaction, with the rights of the caller.
CREATE OR REPLACE FUNCTION pgtrickle._align_node_capture(source regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    answer record;
BEGIN
    FOR answer IN
        SELECT *
        FROM run_command_on_workers(format('SELECT pgtrickle._align_shard_capture(%L)',
                                           pgtrickle._shard_capture_spec(source)))
    LOOP
        IF NOT answer.success THEN
            RAISE EXCEPTION 'changes of % cannot be captured on node %:%: %', source, answer.nodename, answer.nodeport,
                    answer.result
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = format('Fix it there and try again; the other nodes keep what '
                                    'they have. If permission was denied: %I needs TRIGGER '
                                    'on the table and all its partitions.', current_user);
        END IF;
    END LOOP;
END
$$;
