-- What capture triggers run: the text of a source's capture function, and the markers that it leaves instead of rows.

-- Marks that rows could not be captured. One marker per transaction: readers that have not seen that transaction
-- re-initialize.
CREATE OR REPLACE FUNCTION pgtrickle._mark(stable_name text, marker text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    current bigint := txid_current();
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle_changes.pgt_markers AS m
                   WHERE m.source_stable_name = stable_name AND m.xid = current AND m.kind = marker) THEN
        INSERT INTO pgtrickle_changes.pgt_markers (source_stable_name, xid, kind)
        VALUES (stable_name, current, marker);
        INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid) VALUES (stable_name, current);
    END IF;
END
$$;

-- Called only when a buffer is larger than the limit in the text of its capture function: reading the setting in every
-- statement would cost as much as capturing. While a service runs, the rows will be read.
CREATE OR REPLACE FUNCTION pgtrickle._overflows(buffer regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT EXISTS (SELECT FROM pgtrickle.pgt_services
                       WHERE kind = 'service' AND last_seen > clock_timestamp() - interval '1 minute')
       AND NOT EXISTS (SELECT FROM pgtrickle.pgt_consumers WHERE seen_at > clock_timestamp() - interval '1 minute')
       AND (SELECT sum(pg_stat_get_live_tuples(part)) FROM pgtrickle._partition_tree(buffer) AS part)
           > pgtrickle._setting('max_buffer_rows')::bigint
$$;

-- A MERGE that moves rows to another partition leaves them out of the transition tables of its UPDATE (PostgreSQL 15
-- to 18). A trigger cannot tell that it runs for a MERGE. So a statement that may be one counts as one if rows were
-- deleted in a partition. `context` is the rest of PG_CONTEXT below the capture function: the statement that fired it,
-- except those of SQL functions; nothing if the client sent that statement itself, or EXECUTE.
CREATE OR REPLACE FUNCTION pgtrickle._hides_moved_rows(relation oid, context text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    below text := substr(context, nullif(strpos(context, E'\n'), 0) + 1);
    statement text := CASE WHEN below IS NULL THEN current_query()
                           ELSE substring(below FROM '^SQL statement "(.*)"(?:\nPL/pgSQL|\nSQL|$)') END;
BEGIN
    -- The text of a statement can contain what looks like its end, so it extends to the last one, without the lines
    -- that PL/pgSQL adds for each function.
    statement := regexp_replace(statement,
                                '\nPL/pgSQL function [\w.$]+\([\w ,.\[\]]*\) line \d+ at [A-Za-z ]+(?=\n|$)', '', 'g');
    IF statement !~* '\m(merge|execute)\M' THEN
        RETURN false;
    END IF;
    RETURN NOT current_setting('track_counts')::boolean OR EXISTS (
        SELECT FROM pgtrickle._partition_tree(relation) AS member WHERE pg_stat_get_xact_tuples_deleted(member) > 0);
END
$$;

-- Whether a partition or child of a table lacks a trigger that calls this function. Rows written there through the
-- table would be captured, but lost when it is detached or dropped before a refresh. pg_partition_tree() ignores the
-- snapshot.
CREATE OR REPLACE FUNCTION pgtrickle._lacks_capture_trigger(relation oid, capture oid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM (SELECT t.relid::oid FROM pg_partition_tree(relation) AS t
                     UNION SELECT pgtrickle._partition_tree(relation)) AS member (relid)
        WHERE NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = member.relid AND t.tgfoid = capture));
END
$$;

-- Whether the tracked columns of the source are still these: arrays indexed by column number, NULL for columns that
-- are not tracked. A dropped column keeps its row in pg_attribute, so searching for rows that differ finds it as well.
-- Also checks that everything below the source is captured.
CREATE OR REPLACE FUNCTION pgtrickle._columns_fit_now(source regclass, names name[], types oid[], typmods int[])
RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (SELECT c.relhassubclass FROM pg_class AS c WHERE c.oid = source)
       AND EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = source
                     AND t.tgname LIKE 'pgtrickle\_capture\_insert\_%'
                   AND pgtrickle._lacks_capture_trigger(source, t.tgfoid)) THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (
        SELECT FROM pg_attribute
        WHERE attrelid = source AND attnum > 0
          AND NOT (attname = names[attnum] AND atttypid = types[attnum] AND atttypmod = typmods[attnum]));
END
$$;

-- The same, evaluated when a statement is planned: IMMUTABLE has that effect. The plan is valid until the source is
-- altered, because it names the source as a regclass constant; a writer that holds a lock on the table has received
-- every ALTER before. Reading the catalog in every statement took a third of the time of a single-row writer. The
-- function called here is VOLATILE so that it uses a new snapshot: the planner's may be older than the lock on the
-- table (in a cascade).
CREATE OR REPLACE FUNCTION pgtrickle._columns_fit(source regclass, names name[], types oid[], typmods int[])
RETURNS boolean
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN pgtrickle._columns_fit_now(source, names, types, typmods);
END
$$;

-- The body of capture_<hash>(). It runs in every writer's transaction, so it must not fail or store values of the
-- wrong column, whatever was done to the table since it was written: before it reads a column, it compares the tracked
-- columns with the catalog, and leaves a marker if they differ. PL/pgSQL analyzes each statement when it is reached,
-- so an outdated INSERT does no harm. Columns of partitions are found by name; their order may differ. The comparison
-- is part of the INSERT into pgt_activity, which is planned again after the source is altered.
--
-- A snapshot of REPEATABLE READ may be older than the last ALTER of the table. Names then come from
-- pg_identify_object_as_address() and types from pg_typeof(), which ignore the snapshot, and the INSERT is a different
-- one: a plan made with such a snapshot would keep its answer for later transactions.
CREATE OR REPLACE FUNCTION pgtrickle._capture_body(source regclass, stable_name text, columns smallint[], kind text)
RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    expected record;
    of_column record;
    parameters jsonb;
BEGIN
    SELECT array_agg(CASE WHEN attnum = ANY (columns) THEN attname END ORDER BY attnum) AS names,
           array_agg(CASE WHEN attnum = ANY (columns) THEN atttypid END ORDER BY attnum) AS types,
           array_agg(CASE WHEN attnum = ANY (columns) THEN atttypmod END ORDER BY attnum) AS typmods
    INTO expected
    FROM pg_attribute WHERE attrelid = source AND attnum BETWEEN 1 AND (SELECT max(n) FROM unnest(columns) AS n);
    SELECT coalesce(string_agg(format('(pg_identify_object_as_address(1259, %s, %s)).object_names[3] = %L',
                                      source::oid, attnum, attname), E'\n            AND '
                                          ORDER BY attnum), 'true') AS named,
           coalesce(string_agg(format('pg_typeof(r.%I) = %s::regtype', attname, atttypid), ' AND ' ORDER BY attnum),
                    'true') AS typed,
           coalesce(string_agg(format('pg_typeof(NEW.%I) = %s::regtype', attname, atttypid), ' AND ' ORDER BY attnum),
                    'true') AS new_typed,
           coalesce(string_agg(format('pg_typeof(OLD.%I) = %s::regtype', attname, atttypid), ' AND ' ORDER BY attnum),
                    'true') AS old_typed,
           string_agg(', c' || attnum, '' ORDER BY attnum) AS targets,
           string_agg(format(', r.%I', attname), '' ORDER BY attnum) AS selected,
           string_agg(format(', NEW.%I', attname), '' ORDER BY attnum) AS new_values,
           string_agg(format(', OLD.%I', attname), '' ORDER BY attnum) AS old_values
    INTO of_column
    FROM pg_attribute WHERE attrelid = source AND attnum = ANY (columns);

    parameters := jsonb_build_object(
        'stable_name', stable_name, 'source', source::oid, 'turn', 'pgtrickle_changes.turn_' || stable_name,
        'buffer', 'pgtrickle_changes.changes_' || stable_name, 'spare', 'pgtrickle_changes.spare_' || stable_name,
        'buffer_limit', pgtrickle._setting('max_buffer_rows'),
        'columns', format('(%L::regclass, %L::name[], %L::oid[], %L::int[])',
                          source::oid, expected.names, expected.types, expected.typmods),
        'targets', of_column.targets, 'selected', of_column.selected,
        'new_values', of_column.new_values, 'old_values', of_column.old_values, 'names_match', of_column.named,
        'old_types_match', CASE kind WHEN 'row' THEN of_column.old_typed
                                     ELSE format('(SELECT %s FROM __pgt_old AS r LIMIT 1)', of_column.typed) END,
        'new_types_match', CASE kind WHEN 'row' THEN of_column.new_typed
                                     ELSE format('(SELECT %s FROM __pgt_new AS r LIMIT 1)', of_column.typed) END);
    RETURN pgtrickle._fill_template('capture', parameters || jsonb_build_object(
        'check_merge', CASE WHEN kind = 'statement' AND (SELECT relkind FROM pg_class WHERE oid = source) = 'p'
                            THEN pgtrickle._template('capture_check_merge') END,
        'store', pgtrickle._fill_template(CASE kind WHEN 'row' THEN 'capture_row' ELSE 'capture_statement' END,
                                          parameters)));
END
$$;

-- Writes the limit into all capture functions and leaves the rest of their text, which must fit the buffer as it is.
CREATE OR REPLACE FUNCTION pgtrickle._update_buffer_limits() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pgtrickle._write_capture_function(
        t.source_stable_name,
        regexp_replace(p.prosrc, '(pg_stat_get_live_tuples\([^)]*\)\s+(?:>|<=|OPERATOR\(pg_catalog\.<=\))) \d+',
                       '\1 ' || pgtrickle._setting('max_buffer_rows'), 'g'))
    FROM pgtrickle.pgt_change_tracking AS t
    JOIN pg_proc AS p ON p.oid = to_regprocedure(format('pgtrickle_changes.capture_%s()', t.source_stable_name))
$$;
