-- Capture of tables that Citus manages, or may manage at any time. Citus creates the triggers of a distributed table
-- on its shards, and moves them with the shards. They write into buffers of the node on which they fire.

-- What nodes need to know to capture the changes of a table. The text of the function is the same everywhere, because
-- Citus copies functions to new nodes: it contains no OIDs of tables, and names every column.
CREATE OR REPLACE FUNCTION pgtrickle._shard_capture_spec(source regclass) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'name', format('%I.%I', n.nspname, c.relname),
        'stable_name',
        coalesce((SELECT t.source_stable_name FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source),
                                -- A table that Citus re-created has kept its triggers.
                                (SELECT min(t.source_stable_name) FROM pgtrickle.pgt_change_tracking AS t
                                 JOIN pg_trigger AS g ON g.tgrelid = source
                                   AND g.tgname = 'pgtrickle_capture_insert_' || t.source_stable_name
                                 WHERE pgtrickle._is_gone(t.source_relid)),
                                pgtrickle._stable_name(source)),
        'placement', pgtrickle._citus_placement(source), 'partitioned', c.relkind = 'p',
        'columns',
        (SELECT coalesce(jsonb_agg(jsonb_build_object('attnum', a.attnum, 'name', a.attname) ORDER BY a.attnum), '[]')
                    FROM pg_attribute AS a
                    WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'))
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source
$$;

-- The same, with what this node knows of the table itself. Only column numbers are taken from the argument: those of
-- the coordinator, because on other nodes a table has no dropped columns. Nobody may capture under the name of another
-- table.
CREATE OR REPLACE FUNCTION pgtrickle._local_shard_spec(caller name, source regclass, said jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stable_name text := said ->> 'stable_name';
    tracked text := (SELECT t.source_stable_name FROM pgtrickle.pgt_change_tracking AS t
                     WHERE t.source_relid = source);
BEGIN
    IF NOT pgtrickle._has_citus() THEN
        RAISE EXCEPTION 'database % has no Citus', quote_ident(current_database())
            USING ERRCODE = 'feature_not_supported';
    ELSIF stable_name !~ '^[0-9a-f]{16}$' OR tracked <> stable_name
       OR EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t
                  WHERE t.source_stable_name = stable_name AND t.source_relid <> source
                    AND NOT pgtrickle._is_gone(t.source_relid)) THEN
        RAISE EXCEPTION '% cannot be captured as %', source, quote_literal(stable_name)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Another table has that name, or this one is captured under another name.';
    ELSIF tracked IS NULL
          AND stable_name <> (SELECT pgtrickle.stable_hash(format('%I.%I', n.nspname, c.relname)) FROM pg_class AS c
                                              JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source)
          AND NOT EXISTS (SELECT FROM pg_trigger AS g
                          WHERE g.tgrelid = source AND g.tgname = 'pgtrickle_capture_insert_' || stable_name
                          AND g.tgfoid = to_regprocedure(format('pgtrickle_changes.capture_%s()', stable_name)))
          AND NOT has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE') THEN
        RAISE EXCEPTION 'role % may not capture % under a name that it had before', quote_ident(caller), source
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Ask the owner of the database or the role that installed pgtrickle.';
    END IF;
    RETURN (
        SELECT jsonb_build_object(
            'name', format('%I.%I', n.nspname, c.relname), 'stable_name', stable_name, 'placement',
            pgtrickle._citus_placement(source),
            'partitioned', c.relkind = 'p',
            'columns', (SELECT coalesce(jsonb_agg(jsonb_build_object(
                            'attnum', (s ->> 'attnum')::smallint, 'name', a.attname, 'type',
                            pgtrickle._base_type(a.atttypid),
                            'stored', pgtrickle._buffer_type(source, a.attnum))
                                ORDER BY (s ->> 'attnum')::smallint), '[]')
                        FROM jsonb_array_elements(said -> 'columns') AS s
                        JOIN pg_attribute AS a ON a.attrelid = source AND a.attname = s ->> 'name' AND a.attnum > 0
                          AND NOT a.attisdropped))
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source);
END
$$;

-- FROM clause of the statements of a capture trigger: r.types are the current types of these columns; no row if no row
-- was changed. PostgreSQL reads the columns of a transition table when it analyzes a statement, whatever the snapshot
-- is, and again after an ALTER, without reading a catalog. The planner replaces each CASE by a NULL of its column's
-- type, and record_send() writes types. A name that the transition table lacks is found in `lacking`, with another
-- type.
CREATE OR REPLACE FUNCTION pgtrickle._column_types_clause(definition jsonb, transition_table text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT rtrim(pgtrickle._fill_template('capture_shards_types', jsonb_build_object(
        'missing_columns', string_agg(format('NULL::pg_catalog.%s AS %I',
                                             CASE c.type WHEN 'int4'::regtype THEN 'text' ELSE 'int4' END, c.name),
                                             ', ' ORDER BY c.attnum),
        'column_types', string_agg(format('CASE WHEN false THEN %I END', c.name), ', ' ORDER BY c.attnum),
        'transition_table', transition_table)), E'\n')
    FROM jsonb_to_recordset(definition -> 'columns') AS c (attnum int, name text, type oid)
$$;

-- In the trigger of a partition: whether it still is a partition of the table captured under this name.
-- pg_partition_root() ignores the snapshot, but an old snapshot may not show whether the root has its trigger.
CREATE OR REPLACE FUNCTION pgtrickle._is_partition(stable_name text, relation oid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    root regclass := pg_partition_root(relation);
BEGIN
    IF root IS NULL THEN
        RETURN false;
    ELSIF EXISTS (SELECT FROM pg_trigger AS t
                  WHERE t.tgrelid = root
                    AND t.tgfoid = to_regprocedure('pgtrickle_changes.capture_' || stable_name || '()')) THEN
        RETURN true;
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM pgtrickle._mark(stable_name, 'SCHEMA');
    END IF;
    RETURN false;
END
$$;

-- Whether everything is captured below the partitioned tables that are captured under this name and locked by this
-- session, that is, written by it. The text is shared by many shards and cannot name the table.
CREATE OR REPLACE FUNCTION pgtrickle._partitions_fit_now(stable_name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    capture oid := to_regprocedure('pgtrickle_changes.capture_' || stable_name || '()');
BEGIN
    RETURN NOT EXISTS (
        SELECT FROM pg_lock_status() AS l
        JOIN pg_trigger AS t ON t.tgrelid = l.relation AND t.tgfoid = capture
          AND t.tgname LIKE 'pgtrickle\_capture\_insert\_%'
        WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation'
          AND pgtrickle._lacks_capture_trigger(l.relation, capture));
END
$$;

-- The same when a statement is planned, as _columns_fit() does for plain tables: PL/pgSQL has separate plans for each
-- shard, and a plan that reads a transition table is made again when partitions of the trigger's table come or go.
CREATE OR REPLACE FUNCTION pgtrickle._partitions_fit(stable_name text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN pgtrickle._partitions_fit_now(stable_name);
END
$$;

-- The body of capture_<hash>(). Like the one for plain tables, it must not fail or store values of the wrong column,
-- whatever was done to the table since.
--
-- One statement finds out that nothing is wrong, as is nearly always the case: a single-row writer pays half a
-- microsecond for every operator and function in PL/pgSQL, and ten for every statement. The second table of a buffer
-- is written every other turn, see _purge().
--
-- A missing column fails a statement when it is planned: not before the statement that compares columns has run.
CREATE OR REPLACE FUNCTION pgtrickle._shard_capture_body(definition jsonb) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stable_name text := definition ->> 'stable_name';
    partitioned boolean := definition -> 'partitioned';
    turn text := 'pgtrickle_changes.turn_' || stable_name;
    of_column record;
    parameters jsonb;
    operations jsonb;
BEGIN
    SELECT '\x'
           || encode(int4send(count(*)::int)
                     || coalesce(string_agg(oidsend(c.type) || int4send(-1), '' ORDER BY c.attnum), ''),
                     'hex') AS types,
           string_agg(', c' || c.attnum, '' ORDER BY c.attnum) AS targets,
           string_agg(format(', r.%I', c.name), '' ORDER BY c.attnum) AS selected
    INTO of_column
    FROM jsonb_to_recordset(definition -> 'columns') AS c (attnum int, name text, type oid);

    parameters := jsonb_build_object(
        'stable_name', stable_name, 'turn', turn,
        -- New nodes get the coordinator's text, and have no sequence.
        'turn_relation',
        format(CASE WHEN pgtrickle._citus_group() = 0 THEN 'pg_catalog.to_regclass(%L)'
                    ELSE '%L::pg_catalog.regclass' END, turn),
        'buffer', 'pgtrickle_changes.changes_' || stable_name, 'spare', 'pgtrickle_changes.spare_' || stable_name,
        'buffer_limit', pgtrickle._setting('max_buffer_rows'), 'expected_types', quote_literal(of_column.types),
        'partitions_fit', CASE WHEN partitioned THEN format(' AND pgtrickle._partitions_fit(%L)', stable_name) END,
        'targets', of_column.targets, 'quoted_targets', quote_nullable(of_column.targets), 'quoted_selected',
        quote_nullable(of_column.selected),
        -- Every node applies changes of a reference table: the coordinator's are captured.
        'captured_elsewhere',
        CASE WHEN definition ->> 'placement' = 'reference' THEN 'pgtrickle._citus_group() OPERATOR(pg_catalog.<>) 0'
                                   ELSE
                                       format('TG_NARGS OPERATOR(pg_catalog.>) 0 AND NOT '
                                              'pgtrickle._is_partition(%L, TG_RELID)', stable_name) END);
    SELECT jsonb_object_agg(o.name,
                            pgtrickle._fill_template('capture_shards_operation', parameters || jsonb_build_object(
               'actual_types', pgtrickle._column_types_clause(definition, o.transition_table),
               'changes', pgtrickle._changes_query(upper(o.name), of_column.selected))))
    INTO operations
    FROM (VALUES ('insert', '__pgt_new'), ('update', '__pgt_old'), ('delete', '__pgt_old'))
        AS o (name, transition_table);
    RETURN pgtrickle._fill_template('capture_shards', parameters || operations || jsonb_build_object(
        -- A node without a catalog lacks the functions that the guard calls.
        'guard', CASE WHEN definition ->> 'placement' = 'reference' OR partitioned
                      THEN pgtrickle._fill_template('capture_shards_guard', parameters) END,
        'check_merge',
        CASE WHEN partitioned THEN pgtrickle._fill_template('capture_shards_check_merge', parameters) END));
END
$$;

-- What a trigger stores. `selected` are the values of the columns in a row r. Weights have their column's type: a cast
-- would add a plan node above the two halves of an UPDATE.
CREATE OR REPLACE FUNCTION pgtrickle._changes_query(operation text, selected text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg(format('SELECT pg_catalog.txid_current(), %L::pg_catalog.int2%s FROM %s AS r', c.weight,
                             selected, c.rows),
                      ' UNION ALL ' ORDER BY c.weight)
    FROM (VALUES (-1, '__pgt_old', 'INSERT'), (1, '__pgt_new', 'DELETE')) AS c (weight, rows, not_by)
    WHERE c.not_by <> operation
$$;

-- If a capture function cannot prove that nothing is wrong and rows were changed: leaves a marker, or returns the
-- statement that stores the rows, because only the capture function can read its transition tables. That statement
-- runs with the writer's search path.
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
        IF pgtrickle._citus_placement(relation) = 'local' THEN -- otherwise its shards report it
            PERFORM pgtrickle._mark(stable_name, 'TRUNCATE');
        END IF;
        RETURN 'SELECT';
    ELSIF NOT fits OR NOT pgtrickle._partitions_fit_now(stable_name) THEN
        marker := 'SCHEMA';
    ELSIF pg_stat_get_live_tuples(part::regclass) > pgtrickle._setting('max_buffer_rows')::bigint
          AND pgtrickle._overflows(buffer::regclass) THEN
        marker := 'OVERFLOW';
    END IF;
    IF marker IS NOT NULL THEN
        PERFORM pgtrickle._mark(stable_name, marker);
        RETURN 'SELECT';
    END IF;
    INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid) VALUES (stable_name, txid_current());
    RETURN format('INSERT INTO %s (__pgt_xid, __pgt_w%s) %s', part, targets,
                  pgtrickle._changes_query(operation, selected));
END
$$;
