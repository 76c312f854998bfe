-- Capture of tables that Citus has, or may have at any time. Triggers on a distributed table are Citus's business: it puts them on the
-- shards, and carries them along when shards move. They write into buffers of the node that they fire on.

-- What nodes have to know to capture a table's changes. The function's text is the same everywhere, for Citus copies functions to new
-- nodes: it names no table by its number, and every column by its name.
CREATE OR REPLACE FUNCTION pgtrickle._shard_capture(source regclass) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'name', format('%I.%I', n.nspname, c.relname),
        'stable_name', coalesce((SELECT t.source_stable_name FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source),
                                -- One that Citus made anew has kept its triggers.
                                (SELECT min(t.source_stable_name) FROM pgtrickle.pgt_change_tracking AS t
                                 JOIN pg_trigger AS g ON g.tgrelid = source AND g.tgname = 'pgtrickle_capture_insert_' || t.source_stable_name
                                 WHERE pgtrickle._has_left(t.source_relid)),
                                pgtrickle.stable_hash(format('%I.%I', n.nspname, c.relname))),
        'placement', pgtrickle._citus_placement(source), 'partitioned', c.relkind = 'p',
        'columns', (SELECT coalesce(jsonb_agg(jsonb_build_object('attnum', a.attnum, 'name', a.attname) ORDER BY a.attnum), '[]')
                    FROM pg_attribute AS a
                    WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'))
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source
$$;

-- The same with what this node knows of the table itself. Of what is said by others only numbers of columns are taken: those of the
-- coordinator, for on other nodes a table has no dropped columns. Nobody may capture under the name of another table.
CREATE OR REPLACE FUNCTION pgtrickle._shard_definition(source regclass, said jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stable_name text := said ->> 'stable_name';
    tracked text := (SELECT t.source_stable_name FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source);
BEGIN
    IF stable_name !~ '^[0-9a-f]{16}$' OR tracked <> stable_name
       OR EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t
                  WHERE t.source_stable_name = stable_name AND t.source_relid <> source AND NOT pgtrickle._has_left(t.source_relid)) THEN
        RAISE EXCEPTION '% cannot be captured as %', source, quote_literal(stable_name)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Another table is, or it is captured under another name.';
    ELSIF tracked IS NULL AND stable_name <> (SELECT pgtrickle.stable_hash(format('%I.%I', n.nspname, c.relname)) FROM pg_class AS c
                                              JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source)
          AND NOT EXISTS (SELECT FROM pg_trigger AS g WHERE g.tgrelid = source AND g.tgname = 'pgtrickle_capture_insert_' || stable_name) THEN
        PERFORM pgtrickle._require_administrator('capture a table under a name that it had before');
    END IF;
    RETURN (
        SELECT jsonb_build_object(
            'name', format('%I.%I', n.nspname, c.relname), 'stable_name', stable_name, 'placement', pgtrickle._citus_placement(source),
            'partitioned', c.relkind = 'p',
            'columns', (SELECT coalesce(jsonb_agg(jsonb_build_object(
                            'attnum', (s ->> 'attnum')::smallint, 'name', a.attname, 'type', pgtrickle._base_type(a.atttypid),
                            'stored', pgtrickle._buffer_type(source, a.attnum)) ORDER BY (s ->> 'attnum')::smallint), '[]')
                        FROM jsonb_array_elements(said -> 'columns') AS s
                        JOIN pg_attribute AS a ON a.attrelid = source AND a.attname = s ->> 'name' AND a.attnum > 0 AND NOT a.attisdropped))
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source);
END
$$;

-- FROM clause of a capture trigger's statements: r.types tells what types these columns have now, no row if none was touched. PostgreSQL knows
-- the columns of a transition table when it analyses a statement, whatever the snapshot is, and does so anew after an ALTER; no catalog
-- is asked. The planner makes a NULL of each CASE, of its column's type, and record_send() writes types. A name that is not found there is found
-- in `lacking`, with another type.
CREATE OR REPLACE FUNCTION pgtrickle._types_in(definition jsonb, touched text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format($sql$(SELECT %s) AS lacking,
                LATERAL (SELECT pg_catalog.record_send(ROW(%s)) AS types FROM %s LIMIT 1) AS r$sql$,
        string_agg(format('NULL::pg_catalog.%s AS %I', CASE c.type WHEN 'int4'::regtype THEN 'text' ELSE 'int4' END, c.name), ', ' ORDER BY c.attnum),
        string_agg(format('CASE WHEN false THEN %I END', c.name), ', ' ORDER BY c.attnum), touched)
    FROM jsonb_to_recordset(definition -> 'columns') AS c (attnum int, name text, type oid)
$$;

-- In the trigger of a partition: whether it still is one, of what is captured under this name. pg_partition_root() knows it in any snapshot,
-- but whether that has its trigger an old one may not tell.
CREATE OR REPLACE FUNCTION pgtrickle._is_partition(stable_name text, relation oid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    root regclass := pg_partition_root(relation);
BEGIN
    IF root IS NULL THEN
        RETURN false;
    ELSIF EXISTS (SELECT FROM pg_trigger AS t
                  WHERE t.tgrelid = root AND t.tgfoid = to_regprocedure('pgtrickle_changes.capture_' || stable_name || '()')) THEN
        RETURN true;
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM pgtrickle._mark(stable_name, 'SCHEMA');
    END IF;
    RETURN false;
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._is_partition(text, oid) FROM PUBLIC;

-- The body of capture_<hash>(). As the one for plain tables it must not fail and must not store a neighbour's values, whatever was done to
-- the table since.
--
-- Nearly always all is well. That is known with one statement: a single-row writer pays half a microsecond for every operator and function
-- that PL/pgSQL meets, ten for every statement, and five for a search path, hence all names are qualified here. The second
-- table of a buffer is written every other turn, see _purge().
--
-- A column that is not there fails a statement when it is planned: not before the one that compares columns was run.
CREATE OR REPLACE FUNCTION pgtrickle._shard_capture_body(definition jsonb) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format($body$
#variable_conflict use_column
DECLARE
    fits boolean;
    context text;
BEGIN
    %2$s%3$sEND IF;
    IF pg_catalog.to_regclass('pgtrickle_changes.turn_%1$s') IS NOT NULL THEN -- else a new node, which nobody reads yet: who will starts over
        EXECUTE pgtrickle._store_or_mark('%1$s', TG_OP, TG_RELID, fits, %4$L, %5$L);
    END IF;
    RETURN NEW; -- that is NULL, without an expression
END
$body$,
        definition ->> 'stable_name',
        -- A change of a reference table happens on every node: the coordinator's is captured. A node without a catalog has no such functions.
        CASE WHEN definition ->> 'placement' = 'reference' OR (definition -> 'partitioned')::boolean THEN
            format($body$IF pg_catalog.to_regclass('pgtrickle_changes.turn_%s') IS NULL THEN
        RETURN NEW;
    END IF;
    IF %s THEN
        RETURN NEW;
    END IF;
    $body$, definition ->> 'stable_name',
                CASE WHEN definition ->> 'placement' = 'reference' THEN 'pgtrickle._citus_group() OPERATOR(pg_catalog.<>) 0'
                     ELSE format('TG_NARGS OPERATOR(pg_catalog.>) 0 AND NOT pgtrickle._is_partition(%L, TG_RELID)', definition ->> 'stable_name') END) END,
        (SELECT string_agg(format($body$IF TG_OP OPERATOR(pg_catalog.=) %L THEN
        %s%sEND IF;
        fits := (SELECT r.types OPERATOR(pg_catalog.=) %L FROM %s);
        IF fits IS NULL THEN
            RETURN NEW;
        END IF;
    $body$, o.operation,
            CASE WHEN o.operation = 'UPDATE' AND (definition -> 'partitioned')::boolean THEN format($body$GET DIAGNOSTICS context = PG_CONTEXT;
        IF pgtrickle._hides_moved_rows(TG_RELID, context) THEN
            PERFORM pgtrickle._mark(%L, 'MERGE');
            RETURN NEW;
        END IF;
        $body$, definition ->> 'stable_name') END,
            p.ways, c.types, pgtrickle._types_in(definition, o.touched)), 'ELS' ORDER BY o.number)
         FROM (VALUES (1, 'INSERT', '__pgt_new'), (2, 'UPDATE', '__pgt_old'), (3, 'DELETE', '__pgt_old')) AS o (number, operation, touched)
         CROSS JOIN LATERAL (
            SELECT string_agg(format($body$IF pg_catalog.pg_sequence_last_value(%8$s) OPERATOR(pg_catalog.%%) 2 OPERATOR(pg_catalog.=) %1$s THEN
            INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
            SELECT %2$L, pg_catalog.txid_current() FROM %3$s
            WHERE r.types OPERATOR(pg_catalog.=) %9$L
                AND pg_catalog.pg_stat_get_live_tuples('pgtrickle_changes.%4$s'::pg_catalog.regclass) OPERATOR(pg_catalog.<=) %5$s;
            IF FOUND THEN
                INSERT INTO pgtrickle_changes.%4$s (__pgt_xid, __pgt_w%6$s)
                %7$s;
                RETURN NEW;
            END IF;
        $body$, part.turn, definition ->> 'stable_name', pgtrickle._types_in(definition, o.touched), part.name,
                pgtrickle._setting('max_buffer_rows'), c.targets, pgtrickle._changes_of(o.operation, c.selected),
                -- New nodes get the coordinator's text, and have no sequence.
                format(CASE WHEN pgtrickle._citus_group() = 0 THEN 'pg_catalog.to_regclass(%L)' ELSE '%L::pg_catalog.regclass' END,
                       'pgtrickle_changes.turn_' || (definition ->> 'stable_name')), c.types), 'ELS' ORDER BY part.turn DESC)
            FROM (VALUES (1, 'changes_' || (definition ->> 'stable_name')), (0, 'spare_' || (definition ->> 'stable_name'))) AS part (turn, name)
         ) AS p (ways)),
        c.targets, c.selected)
    FROM (SELECT '\x' || encode(int4send(count(*)::int) || coalesce(string_agg(oidsend(c.type) || int4send(-1), '' ORDER BY c.attnum), ''), 'hex') AS types,
                 string_agg(', c' || c.attnum, '' ORDER BY c.attnum) AS targets,
                 string_agg(format(', r.%I', c.name), '' ORDER BY c.attnum) AS selected
          FROM jsonb_to_recordset(definition -> 'columns') AS c (attnum int, name text, type oid)) AS c
$$;

-- What a trigger stores. `selected` are the values of the columns in a row r. Weights have their column's type: a cast would be one more node
-- above the two halves of an UPDATE.
CREATE OR REPLACE FUNCTION pgtrickle._changes_of(operation text, selected text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg(format('SELECT pg_catalog.txid_current(), %L::pg_catalog.int2%s FROM %s AS r', c.weight, selected, c.rows),
                      ' UNION ALL ' ORDER BY c.weight)
    FROM (VALUES (-1, '__pgt_old', 'INSERT'), (1, '__pgt_new', 'DELETE')) AS c (weight, rows, not_by)
    WHERE c.not_by <> operation
$$;

-- Where a capture function cannot see that all is well, and rows were touched: leaves a marker, or returns the statement that stores the
-- rows, for only the function itself can read its transition tables. It is run with whatever search path the writer has.
CREATE OR REPLACE FUNCTION pgtrickle._store_or_mark(
    stable_name text, operation text, relation oid, fits boolean, targets text, selected text)
RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    buffer text := 'pgtrickle_changes.changes_' || stable_name;
    part text := CASE pg_sequence_last_value(to_regclass('pgtrickle_changes.turn_' || stable_name)) % 2
                     WHEN 0 THEN 'pgtrickle_changes.spare_' || stable_name ELSE buffer END;
    marker text;
BEGIN
    IF operation = 'TRUNCATE' THEN
        IF pgtrickle._citus_placement(relation) = 'local' THEN -- else its shards tell
            PERFORM pgtrickle._mark(stable_name, 'TRUNCATE');
        END IF;
        RETURN 'SELECT';
    ELSIF NOT fits THEN
        marker := 'SCHEMA';
    ELSIF pg_stat_get_live_tuples(part::regclass) > pgtrickle._setting('max_buffer_rows')::bigint AND pgtrickle._overflows(buffer::regclass) THEN
        marker := 'OVERFLOW';
    END IF;
    IF marker IS NOT NULL THEN
        PERFORM pgtrickle._mark(stable_name, marker);
        RETURN 'SELECT';
    END IF;
    INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid) VALUES (stable_name, txid_current());
    RETURN format('INSERT INTO %s (__pgt_xid, __pgt_w%s) %s', part, targets, pgtrickle._changes_of(operation, selected));
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._store_or_mark(text, text, oid, boolean, text, text) FROM PUBLIC;

-- Buffer and capture function on this node, made or brought up to date. What a buffer has it keeps: older changes may still be read.
CREATE OR REPLACE FUNCTION pgtrickle._track_shards(source regclass, said jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    definition jsonb := pgtrickle._shard_definition(source, said);
    stable_name text := definition ->> 'stable_name';
    buffer regclass;
    col jsonb;
    has text;
BEGIN
    PERFORM pgtrickle._require_trigger_right(source);
    PERFORM pg_advisory_xact_lock(hashtextextended('pgtrickle.track ' || stable_name, 0));
    -- Citus makes a table anew to distribute it otherwise. Its triggers stay, and so does what belongs to them.
    UPDATE pgtrickle.pgt_change_tracking AS t SET source_relid = source
    WHERE t.source_stable_name = stable_name AND t.capture_kind = 'shards' AND t.source_relid <> source
      AND pgtrickle._has_left(t.source_relid);
    IF FOUND THEN
        PERFORM pgtrickle._mark(stable_name, 'SCHEMA');
        UPDATE pgtrickle.pgt_consumers AS c SET source_relid = source WHERE c.source_stable_name = stable_name;
    ELSIF NOT EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source) THEN
        PERFORM pgtrickle._begin_tracking(source, 'shards', stable_name);
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
    PERFORM pgtrickle._write_capture_function(stable_name, pgtrickle._shard_capture_body(definition), 'shards');
    UPDATE pgtrickle.pgt_change_tracking AS t
    SET capture_kind = 'shards',
        tracked_columns = ARRAY(SELECT (c ->> 'attnum')::smallint FROM jsonb_array_elements(definition -> 'columns') AS c ORDER BY 1)
    WHERE t.source_relid = source;
END
$$;

-- What can be written to on this node: the shards of a table and of its partitions, or these themselves.
CREATE OR REPLACE FUNCTION pgtrickle._captured_here(source regclass) RETURNS TABLE (relation regclass, suffix text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pgtrickle._citus_placement(source) = 'local' THEN
        RETURN QUERY SELECT member::regclass, '' FROM pgtrickle._tree(source) AS member;
    ELSE
        RETURN QUERY SELECT to_regclass(h.shard), '_' || h.shardid
                     FROM pgtrickle._tree(source) AS member CROSS JOIN LATERAL pgtrickle._shards_here(member) AS h
                     WHERE to_regclass(h.shard) IS NOT NULL;
    END IF;
END
$$;

-- One of the four capture triggers, of a table or of a shard, whose triggers have its number behind their names. Those of partitions have an
-- argument.
CREATE OR REPLACE FUNCTION pgtrickle._create_shard_trigger(relation regclass, operation text, stable_name text, suffix text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION pgtrickle_changes.%I(%s)',
        format('pgtrickle_capture_%s_%s%s', lower(operation), stable_name, suffix), operation, relation,
        CASE operation WHEN 'INSERT' THEN 'REFERENCING NEW TABLE AS __pgt_new'
                       WHEN 'UPDATE' THEN 'REFERENCING OLD TABLE AS __pgt_old NEW TABLE AS __pgt_new'
                       WHEN 'DELETE' THEN 'REFERENCING OLD TABLE AS __pgt_old' END,
        'capture_' || stable_name, CASE WHEN (SELECT c.relispartition FROM pg_class AS c WHERE c.oid = relation) THEN '''partition''' END);
END
$$;

-- Triggers that lack here: Citus sends those for TRUNCATE to shards that move, not to those that are there; and somebody may have switched
-- one off. Replacing one waits for the writers of its table, and keeps new ones out until the end of the transaction.
CREATE OR REPLACE FUNCTION pgtrickle._attach_here(source regclass, stable_name text, lock_out boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted record;
BEGIN
    FOR wanted IN
        SELECT h.relation, h.suffix, o.operation, t.oid IS NULL AS lacks FROM pgtrickle._captured_here(source) AS h
        CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS o (operation)
        LEFT JOIN pg_trigger AS t ON t.tgrelid = h.relation AND t.tgenabled = 'O'
            AND t.tgname = format('pgtrickle_capture_%s_%s%s', lower(o.operation), stable_name, h.suffix)
        WHERE t.oid IS NULL OR lock_out AND o.operation = 'TRUNCATE'
        ORDER BY h.relation::oid, o.operation
    LOOP
        PERFORM pgtrickle._create_shard_trigger(wanted.relation, wanted.operation, stable_name, wanted.suffix);
        IF wanted.lacks THEN
            PERFORM pgtrickle._mark_gap(source, stable_name);
        END IF;
    END LOOP;
END
$$;

-- Who has read a table before starts over: nobody knows since when a trigger was not there.
CREATE OR REPLACE FUNCTION pgtrickle._mark_gap(source regclass, stable_name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_trigger_right(source);
    PERFORM pgtrickle._mark(t.source_stable_name, 'GAP') FROM pgtrickle.pgt_change_tracking AS t
    WHERE t.source_relid = source AND t.source_stable_name = stable_name;
END
$$;

-- Capture on this node as it should be, but for the triggers that Citus makes. Who has begun to write under another text of the function must
-- have ended before rows are read: what it stores is what that text says.
CREATE OR REPLACE FUNCTION pgtrickle._fit_shards(said jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    source regclass := (said ->> 'name')::regclass;
    definition jsonb := pgtrickle._shard_definition(source, said);
    capture regprocedure := to_regprocedure(format('pgtrickle_changes.capture_%s()', definition ->> 'stable_name'));
    attached boolean;
    former text := current_setting('lock_timeout');
    timeout text := pgtrickle._setting('lock_timeout_ms') || 'ms';
BEGIN
    PERFORM pgtrickle._keep_ddl_here(), set_config('lock_timeout', timeout, true);
    attached := EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = source AND t.tgfoid = capture);
    IF attached AND pgtrickle._shard_capture_body(definition) <> (SELECT p.prosrc FROM pg_proc AS p WHERE p.oid = capture) THEN
        PERFORM pgtrickle._attach_here(source, definition ->> 'stable_name', true);
    END IF;
    PERFORM pgtrickle._track_shards(source, definition);
    IF attached THEN
        PERFORM pgtrickle._attach_here(source, definition ->> 'stable_name', false);
    END IF;
    PERFORM set_config('lock_timeout', former, true);
EXCEPTION WHEN lock_not_available THEN
    RAISE EXCEPTION 'could not lock % within %', source, timeout
        USING ERRCODE = 'lock_not_available', HINT = 'Try again when its writers have ended, or raise the setting lock_timeout_ms.';
END
$$;

-- Lets DDL reach the shards, on all nodes, and has them wait for locks no longer than we do: Citus passes on what SET LOCAL says, and nothing
-- else. Gives what was set before, for _end_ddl().
CREATE OR REPLACE FUNCTION pgtrickle._send_ddl() RETURNS jsonb
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former jsonb := (SELECT jsonb_object_agg(name, current_setting(name))
                     FROM unnest(ARRAY['lock_timeout', 'citus.enable_ddl_propagation', 'citus.enable_unsafe_triggers',
                                       'citus.propagate_set_commands']) AS name);
BEGIN
    PERFORM set_config('citus.enable_ddl_propagation', 'on', true), set_config('citus.enable_unsafe_triggers', 'on', true),
            set_config('citus.propagate_set_commands', 'local', true);
    EXECUTE format('SET LOCAL lock_timeout = %L', former ->> 'lock_timeout');
    RETURN former;
END
$$;

-- The rest of the transaction is somebody else's: the nodes have their own lock_timeout again, and all settings here are what they were.
CREATE OR REPLACE FUNCTION pgtrickle._end_ddl(former jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    SET LOCAL lock_timeout TO DEFAULT;
    PERFORM set_config(s.key, s.value, true) FROM jsonb_each_text(former) AS s;
END
$$;

-- The triggers, by the coordinator. Every node has its buffer already, or its writers' changes would be missed.
CREATE OR REPLACE FUNCTION pgtrickle._attach_shards(source regclass) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    definition jsonb := pgtrickle._shard_capture(source);
    stable_name text := definition ->> 'stable_name';
    former jsonb;
    wanted record;
    problem text[] := pgtrickle._not_spreadable(source);
BEGIN
    IF pgtrickle._citus_group() <> 0 THEN
        RETURN stable_name; -- on a node, which the coordinator has told what to capture
    ELSIF problem IS NOT NULL THEN
        RAISE EXCEPTION 'changes of % cannot be captured: %', source, problem[1] USING ERRCODE = 'feature_not_supported', HINT = problem[2];
    ELSIF definition ->> 'placement' = 'reference' AND NOT EXISTS (SELECT FROM pgtrickle._shards_here(source)) THEN
        RAISE EXCEPTION 'changes of the reference table % cannot be captured: the coordinator has no copy of it', source
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'SELECT citus_set_coordinator_host(…) and SELECT replicate_reference_tables() give it one.';
    END IF;
    PERFORM pgtrickle._fit_shards(definition);
    IF pgtrickle._citus_placement(source) <> 'local' THEN
        former := pgtrickle._send_ddl();
    END IF;
    FOR wanted IN
        SELECT member::regclass AS relation, o.operation FROM pgtrickle._tree(source) AS member
        CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS o (operation)
        WHERE NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = member AND t.tgenabled = 'O'
                          AND t.tgname = format('pgtrickle_capture_%s_%s', lower(o.operation), stable_name))
        ORDER BY member, o.operation
    LOOP
        PERFORM pgtrickle._create_shard_trigger(wanted.relation, wanted.operation, stable_name, '');
    END LOOP;
    -- Those of a partition that was detached do nothing any more. pg_class does not show shards.
    FOR wanted IN
        SELECT t.tgrelid::regclass AS relation, t.tgname FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
        WHERE t.tgfoid = to_regprocedure('pgtrickle_changes.capture_' || stable_name || '()')
          AND t.tgrelid NOT IN (SELECT pgtrickle._tree(source)) AND pg_has_role(c.relowner, 'USAGE')
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', wanted.tgname, wanted.relation);
    END LOOP;
    IF former IS NOT NULL THEN
        PERFORM pgtrickle._end_ddl(former);
    END IF;
    PERFORM pgtrickle._attach_here(source, stable_name, false);
    RETURN stable_name;
END
$$;

-- With the triggers that call it. A coordinator's goes on all nodes.
CREATE OR REPLACE FUNCTION pgtrickle._drop_capture_function(stable_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    former jsonb;
BEGIN
    IF pgtrickle._has_citus() AND pgtrickle._citus_group() = 0
       AND EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_stable_name = stable_name AND t.capture_kind = 'shards') THEN
        former := pgtrickle._send_ddl();
    END IF;
    EXECUTE format('DROP FUNCTION IF EXISTS pgtrickle_changes.%I() CASCADE', 'capture_' || stable_name);
    IF former IS NOT NULL THEN
        PERFORM pgtrickle._end_ddl(former);
    END IF;
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._drop_capture_function(text) FROM PUBLIC;

-- Changes when a table is placed otherwise, or partitions come or go; 'lacking' while what can be written to here lacks a trigger, or the coordinator
-- has no copy of a reference table. Shards may come and go: what changed of them before is in the buffer of the node that they were on, and the changes of all nodes
-- together are those of the table.
CREATE OR REPLACE FUNCTION pgtrickle._shard_signature(source regclass, stable_name text) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    placement text := pgtrickle._citus_placement(source);
    capture regprocedure := to_regprocedure(format('pgtrickle_changes.capture_%s()', stable_name));
    tree oid[] := ARRAY(SELECT pgtrickle._tree(source));
BEGIN
    IF placement IN ('reference', 'citus_local') AND pgtrickle._citus_group() = 0
            AND NOT EXISTS (SELECT FROM pgtrickle._captured_here(source))
       OR EXISTS (SELECT FROM pgtrickle._captured_here(source) AS h
                  WHERE 4 > (SELECT count(*) FROM pg_trigger AS t WHERE t.tgrelid = h.relation AND t.tgenabled = 'O' AND t.tgfoid = capture)) THEN
        RETURN 'lacking';
    END IF;
    RETURN pgtrickle.stable_hash(concat_ws('|', 'shards', placement,
        (SELECT p.prosrc = pgtrickle._inert_body() FROM pg_proc AS p WHERE p.oid = capture),
        (SELECT string_agg(concat_ws(' ', i.inhrelid, i.inhparent, i.xmin), ',' ORDER BY i.inhrelid)
         FROM pg_inherits AS i WHERE i.inhparent = ANY (tree) OR i.inhrelid = source)));
END
$$;

-- The same on all other nodes, each in a transaction of its own, with the rights of whoever calls.
CREATE OR REPLACE FUNCTION pgtrickle._fit_nodes(source regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    answer record;
BEGIN
    FOR answer IN
        SELECT * FROM run_command_on_workers(format('SELECT pgtrickle._fit_shards(%L)', pgtrickle._shard_capture(source)))
    LOOP
        IF NOT answer.success THEN
            RAISE EXCEPTION 'changes of % cannot be captured on node %:%: %', source, answer.nodename, answer.nodeport, answer.result
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Mend it there and try again: what the other nodes have is used then.';
        END IF;
    END LOOP;
END
$$;
