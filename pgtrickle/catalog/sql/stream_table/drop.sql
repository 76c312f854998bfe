-- Dropping stream tables.

-- Before stream tables are dropped: keeps refreshes out, in the order in which a refresh takes its locks: first the
-- views, then the rows; the tables follow. A view with dependent objects is kept, as in _forget_dropped().
CREATE OR REPLACE FUNCTION pgtrickle._lock_for_drop(caller name, ids bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    view text;
BEGIN
    PERFORM pgtrickle._require_owner(caller, s.pgt_id, 'drop') FROM pgtrickle.pgt_stream_tables AS s
        JOIN pg_class AS c ON c.oid = s.pgt_relid
    WHERE s.pgt_id = ANY (ids);
    FOR view IN SELECT 'q_' || id FROM unnest(ids) AS id ORDER BY ('q_' || id) COLLATE "C" LOOP
        BEGIN
            EXECUTE format('DROP VIEW IF EXISTS pgtrickle_views.%I', view);
        EXCEPTION WHEN dependent_objects_still_exist OR wrong_object_type THEN
            NULL;
        END;
    END LOOP;
    PERFORM FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = ANY (ids) ORDER BY s.pgt_id FOR UPDATE;
END
$$;

-- A stream table and all its readers, readers first.
CREATE OR REPLACE FUNCTION pgtrickle._id_with_readers(id bigint) RETURNS bigint[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE found (pgt_id, depth) AS (
        SELECT id, 0
        UNION ALL
        SELECT d.pgt_id, f.depth + 1 FROM found AS f
        JOIN pgtrickle.pgt_stream_tables AS s ON s.pgt_id = f.pgt_id
        JOIN pgtrickle.pgt_dependencies AS d ON s.pgt_relid IN (d.source_relid, d.through)
    )
    SELECT array_agg(each.pgt_id ORDER BY each.depth DESC, each.pgt_id)
    FROM (SELECT f.pgt_id, max(f.depth) AS depth FROM found AS f GROUP BY 1) AS each
$$;

CREATE OR REPLACE FUNCTION pgtrickle._drop(id bigint, cascade boolean, name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    gone bigint[];
    dropped record;
    -- Another transaction may have dropped it since its name was looked up.
    label text := coalesce((SELECT format('%I.%I', s.pgt_schema, s.pgt_name) FROM pgtrickle.pgt_stream_tables AS s
                            WHERE s.pgt_id = id), name);
    former text := pgtrickle._disable_ddl_propagation();
BEGIN
    BEGIN
        -- New readers that appear while this waits for locks hold one on its table, and are seen in the next round.
        LOOP
            gone := pgtrickle._id_with_readers(id);
            IF cardinality(gone) > 1 AND NOT cascade THEN
                RAISE EXCEPTION 'stream table % is read by %', label,
                        (SELECT string_agg(format('%I.%I', s.pgt_schema, s.pgt_name), ', ' ORDER BY s.pgt_id)
                         FROM pgtrickle.pgt_stream_tables AS s
                         WHERE s.pgt_id = ANY (gone) AND s.pgt_id <> id)
                    USING ERRCODE = 'dependent_objects_still_exist',
                          HINT = 'Drop those first, or drop them too with cascade => true.';
            END IF;
            PERFORM pgtrickle._gate('lock_for_drop', jsonb_build_object('ids', gone));
            FOR dropped IN
                SELECT s.pgt_relid FROM unnest(gone) WITH ORDINALITY AS g (pgt_id, n)
                JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
                JOIN pg_class AS c ON c.oid = s.pgt_relid WHERE s.st_placement NOT IN ('reference', 'distributed')
                ORDER BY g.n
            LOOP
                EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', dropped.pgt_relid);
            END LOOP;
            EXIT WHEN pgtrickle._id_with_readers(id) = gone;
        END LOOP;
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'stream table % cannot be dropped: it is being refreshed, or another transaction uses it',
                label
            USING ERRCODE = 'lock_not_available', HINT = 'Try again when that has ended, or raise lock_timeout.';
    END;
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = id) THEN
        RAISE EXCEPTION 'stream table % was dropped by another transaction', label USING ERRCODE = 'undefined_object';
    END IF;
    FOR dropped IN
        SELECT s.pgt_relid, s.st_placement FROM unnest(gone) WITH ORDINALITY AS g (pgt_id, n)
        JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
        JOIN pg_class AS c ON c.oid = s.pgt_relid ORDER BY g.n
    LOOP
        IF dropped.st_placement IN ('reference', 'distributed') THEN
            PERFORM set_config('citus.enable_ddl_propagation', 'on', true);
        END IF;
        EXECUTE format('DROP TABLE %s %s', dropped.pgt_relid, CASE WHEN cascade THEN 'CASCADE' ELSE 'RESTRICT' END);
        PERFORM pgtrickle._disable_ddl_propagation();
    END LOOP;
    -- The rows and functions that a table dropped by hand would leave.
    PERFORM pgtrickle._forget_dropped();
    PERFORM pgtrickle._untrack_unused();
    PERFORM set_config('citus.enable_ddl_propagation', former, true) WHERE former IS NOT NULL;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.drop_stream_table(name text, cascade boolean DEFAULT false) RETURNS void
LANGUAGE sql
AS $$
    SELECT pgtrickle._drop(pgtrickle._require_id(name), cascade, name)
$$;
