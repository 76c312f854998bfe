-- What the capture triggers run: the text of a source's capture function, and the markers it leaves instead of rows.

-- Where rows could not be captured. TRUNCATE keeps its own xid. The others may happen at every statement for as long
-- as nobody repairs it, so that one marker stands for a block of 64 transactions and carries the block's last xid.
CREATE OR REPLACE FUNCTION pgtrickle._mark(stable_name text, marker text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    current bigint := pg_current_xact_id()::text::bigint;
    marked bigint := CASE WHEN marker = 'TRUNCATE' THEN current ELSE current | 63 END;
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle_changes.pgt_markers AS m
                   WHERE m.source_stable_name = stable_name AND m.xid = marked AND m.kind = marker) THEN
        INSERT INTO pgtrickle_changes.pgt_markers (source_stable_name, xid, kind) VALUES (stable_name, marked, marker);
        INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid) VALUES (stable_name, current);
    END IF;
END
$$;
REVOKE ALL ON FUNCTION pgtrickle._mark(text, text) FROM PUBLIC;

-- The kind of a marker that the frontier has not seen and the current snapshot does; NULL if there is none.
CREATE OR REPLACE FUNCTION pgtrickle._unseen_marker(stable_name text, frontier pg_snapshot) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.kind
    FROM pgtrickle_changes.pgt_markers AS m
    WHERE m.source_stable_name = stable_name
      AND m.xid >= pg_snapshot_xmin(frontier)::text::bigint
      AND (m.xid >= pg_snapshot_xmax(frontier)::text::bigint
           OR EXISTS (SELECT FROM pg_snapshot_xip(frontier) AS open
                      WHERE open::text::bigint
                            BETWEEN CASE WHEN m.kind = 'TRUNCATE' THEN m.xid ELSE m.xid - 63 END AND m.xid))
    ORDER BY m.xid
    LIMIT 1
$$;

-- Asked only about buffers of more than 10,000 rows. With a service at work the rows will be read.
CREATE OR REPLACE FUNCTION pgtrickle._overflows(buffer regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT EXISTS (SELECT FROM pgtrickle.pgt_services WHERE last_seen > clock_timestamp() - interval '1 minute')
       AND pg_stat_get_live_tuples(buffer) > pgtrickle._setting('max_buffer_rows')::bigint
$$;
REVOKE ALL ON FUNCTION pgtrickle._overflows(regclass) FROM PUBLIC;

-- The body of capture_<hash>(). It runs in every writer's transaction, so it must not fail and must not store a
-- neighbour's values, whatever was done to the table since it was written: before it touches a column it compares
-- the tracked columns with the catalog, and on a difference leaves a marker. PL/pgSQL analyses each statement when it
-- is reached, so the stale INSERT does no harm. Columns of partitions are found by name; their order may differ.
--
-- A snapshot of REPEATABLE READ may be older than the table's last ALTER, which the transaction nevertheless meets.
-- There the names come from pg_identify_object_as_address() and the types from pg_typeof(), which see the present.
CREATE OR REPLACE FUNCTION pgtrickle._capture_body(source regclass, stable_name text, columns smallint[], kind text)
RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    buffer text := 'pgtrickle_changes.changes_' || stable_name;
    same_columns text;
    same_names text;
    row_types text;
    new_types text;
    old_types text;
    targets text;
    selected text;
    new_values text;
    old_values text;
    now_xid constant text := '(SELECT pg_current_xact_id()::text::bigint)';
    write text;
BEGIN
    SELECT string_agg(format('attnum = %s AND attname = %L AND atttypid = %s AND atttypmod = %s',
                             attnum, attname, atttypid, atttypmod), E'\n                OR ' ORDER BY attnum),
           string_agg(format('(pg_identify_object_as_address(1259, %s, %s)).object_names[3] = %L',
                             source::oid, attnum, attname), E'\n            AND ' ORDER BY attnum),
           string_agg(format('pg_typeof(r.%I) = %s::regtype', attname, atttypid), ' AND ' ORDER BY attnum),
           string_agg(format('pg_typeof(NEW.%I) = %s::regtype', attname, atttypid), ' AND ' ORDER BY attnum),
           string_agg(format('pg_typeof(OLD.%I) = %s::regtype', attname, atttypid), ' AND ' ORDER BY attnum),
           string_agg(', c' || attnum, '' ORDER BY attnum),
           string_agg(format(', r.%I', attname), '' ORDER BY attnum),
           string_agg(format(', NEW.%I', attname), '' ORDER BY attnum),
           string_agg(format(', OLD.%I', attname), '' ORDER BY attnum)
    INTO same_columns, same_names, row_types, new_types, old_types, targets, selected, new_values, old_values
    FROM pg_attribute WHERE attrelid = source AND attnum = ANY (columns);

    IF kind = 'statement' THEN
        write := format($template$
    IF TG_OP = 'INSERT' THEN
        INSERT INTO %1$s (__pgt_xid, __pgt_w%2$s)
        SELECT %3$s, 1%4$s FROM __pgt_new AS r;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO %1$s (__pgt_xid, __pgt_w%2$s)
        SELECT %3$s, -1%4$s FROM __pgt_old AS r UNION ALL SELECT %3$s, 1%4$s FROM __pgt_new AS r;
    ELSE
        INSERT INTO %1$s (__pgt_xid, __pgt_w%2$s)
        SELECT %3$s, -1%4$s FROM __pgt_old AS r;
    END IF;$template$, buffer, targets, now_xid, selected);
    ELSE
        write := format($template$
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO %1$s (__pgt_xid, __pgt_w%2$s) VALUES (%3$s, -1%4$s);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO %1$s (__pgt_xid, __pgt_w%2$s) VALUES (%3$s, 1%5$s);
    END IF;$template$, buffer, targets, now_xid, old_values, new_values);
    END IF;

    RETURN format($template$
#variable_conflict use_column
DECLARE
    wanting text;
    touched boolean := true;
BEGIN
    -- Attached by somebody else under another name, it would capture twice.
    IF TG_NAME <> 'pgtrickle_capture_' || lower(TG_OP) || '_%1$s' THEN
        RETURN NULL;
    END IF;
    IF TG_RELID <> %2$s AND NOT pgtrickle._descends(TG_RELID, %2$s) THEN
        IF current_setting('transaction_isolation') = 'read committed' THEN
            RETURN NULL;
        END IF;
        wanting := 'SCHEMA';
    ELSIF TG_OP = 'TRUNCATE' THEN
        wanting := 'TRUNCATE';%3$s
    ELSIF pg_stat_get_live_tuples('%4$s'::regclass) > 10000 AND pgtrickle._overflows('%4$s') THEN
        wanting := 'OVERFLOW';
    END IF;%5$s
    IF wanting IS NOT NULL THEN%6$s
        IF touched THEN
            PERFORM pgtrickle._mark('%1$s', wanting);
        END IF;
        RETURN NULL;
    END IF;
%7$s
    IF FOUND THEN
        INSERT INTO pgtrickle_changes.pgt_activity (source_stable_name, xid)
        VALUES ('%1$s', %8$s);
    END IF;
    RETURN NULL;
END
$template$,
        stable_name, source::oid,
        CASE WHEN same_columns IS NOT NULL THEN format($template$
    ELSIF (SELECT count(*) FROM pg_attribute WHERE attrelid = %s
           AND ( %s)) <> %s THEN
        wanting := 'SCHEMA';$template$, source::oid, same_columns, cardinality(columns)) END,
        buffer,
        CASE WHEN same_columns IS NOT NULL THEN format($template$
    IF wanting IS NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        IF NOT coalesce(%s, false) THEN
            wanting := 'SCHEMA';%s
        END IF;
    END IF;$template$, same_names, CASE WHEN kind = 'statement' THEN format($template$
        ELSIF TG_OP = 'DELETE' THEN
            IF NOT coalesce((SELECT %1$s FROM __pgt_old AS r LIMIT 1), true) THEN
                wanting := 'SCHEMA';
            END IF;
        ELSIF NOT coalesce((SELECT %1$s FROM __pgt_new AS r LIMIT 1), true) THEN
            wanting := 'SCHEMA';$template$, row_types) ELSE format($template$
        ELSIF TG_OP = 'DELETE' THEN
            IF NOT (%s) THEN
                wanting := 'SCHEMA';
            END IF;
        ELSIF NOT (%s) THEN
            wanting := 'SCHEMA';$template$, old_types, new_types) END) END,
        CASE WHEN kind = 'statement' THEN $template$
        IF TG_OP = 'INSERT' THEN
            touched := EXISTS (SELECT FROM __pgt_new);
        ELSIF TG_OP <> 'TRUNCATE' THEN
            touched := EXISTS (SELECT FROM __pgt_old);
        END IF;$template$ END,
        write, now_xid);
END
$$;
