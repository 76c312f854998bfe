-- Stream tables of other databases that read tables of this one: the description of a table, and what is kept for
-- them.

-- A cast from or to a type in a table, by a function of a role without the reader's rights, or an operator of such a
-- role in a virtual generated column; NULL if there is none. Values are printed with casts to text or json, keys to
-- look up are read with casts from text, and virtual generated columns are computed when they are read.
CREATE OR REPLACE FUNCTION pgtrickle._untrusted_cast(source regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE inside AS (
        SELECT a.atttypid AS type FROM pg_attribute AS a
        WHERE a.attrelid = source AND a.attnum > 0 AND a.atttypid >= 16384
        UNION
        SELECT part.type FROM inside JOIN pg_type AS t ON t.oid = inside.type
        CROSS JOIN LATERAL (
            SELECT t.typelem UNION ALL SELECT t.typbasetype
            UNION ALL SELECT a.atttypid FROM pg_attribute AS a WHERE a.attrelid = t.typrelid AND a.attnum > 0
            UNION ALL SELECT r.rngsubtype FROM pg_range AS r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
        ) AS part (type) WHERE part.type >= 16384
    )
    SELECT min(u.problem) FROM (
        SELECT format('function %s of role %I casts from or to type %s', p.oid::regprocedure, o.rolname,
                      inside.type::regtype)
        FROM inside JOIN pg_cast AS c ON inside.type IN (c.castsource, c.casttarget)
        JOIN pg_proc AS p ON p.oid = c.castfunc JOIN pg_roles AS o ON o.oid = p.proowner
        WHERE NOT pgtrickle._is_trusted_role(o.oid)
        UNION ALL
        SELECT format('operator %s of role %I is in the expression of column %I', p.oid::regoperator, o.rolname,
                      a.attname)
        FROM pg_attribute AS a JOIN pg_attrdef AS e ON e.adrelid = a.attrelid AND e.adnum = a.attnum
        JOIN pg_depend AS d ON d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid
            AND d.refclassid = 'pg_operator'::regclass
        JOIN pg_operator AS p ON p.oid = d.refobjid JOIN pg_roles AS o ON o.oid = p.oprowner
        WHERE a.attrelid IN (SELECT pgtrickle._partition_tree(source)) AND a.attgenerated = 'v' AND p.oid >= 16384
          AND NOT pgtrickle._is_trusted_role(o.oid)
    ) AS u (problem)
$$;

-- The description of a table for a database that reads it. Domains are replaced by their base types.
CREATE OR REPLACE FUNCTION pgtrickle._describe_table(source regclass) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found jsonb;
BEGIN
    IF (SELECT relkind NOT IN ('r', 'p') FROM pg_class WHERE oid = source) OR NOT pgtrickle._can_capture(source) THEN
        RAISE EXCEPTION 'the changes of % in database % cannot be captured', source,
                quote_ident(current_database())
            USING ERRCODE = 'wrong_object_type', HINT = 'Query the tables behind it.';
    ELSIF pgtrickle._untrusted_cast(source) IS NOT NULL THEN
        RAISE EXCEPTION '% of database % cannot be read for other databases: %', source,
                quote_ident(current_database()),
                pgtrickle._untrusted_cast(source)
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Reading its values would run that code with the rights of the reader. '
                         'Drop the cast, or the column.';
    ELSIF row_security_active(source::oid) THEN
        RAISE EXCEPTION 'row-level security on % of database % applies to role %', source,
                quote_ident(current_database()), quote_ident(current_user)
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Register the database with a role that sees all rows, and put the '
                         'policies on the stream table.';
    END IF;
    WITH RECURSIVE base AS (
        SELECT a.attnum, a.atttypid AS type, a.atttypmod AS typmod, a.attcollation AS collation
        FROM pg_attribute AS a WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT b.attnum, t.typbasetype, CASE WHEN t.typtypmod >= 0 THEN t.typtypmod ELSE b.typmod END, b.collation
        FROM base AS b JOIN pg_type AS t ON t.oid = b.type AND t.typtype = 'd'
    )
    SELECT jsonb_build_object(
        'relid', c.oid::bigint, 'node', pgtrickle._database_identity(), 'schema', n.nspname, 'name', c.relname,
        'stable_name', pgtrickle._stable_name(c.oid),
        'key', (SELECT to_jsonb(array_agg(a.attname ORDER BY k.ord)) FROM pg_index AS i
                CROSS JOIN LATERAL unnest(i.indkey[0 : i.indnkeyatts - 1]) WITH ORDINALITY AS k (attnum, ord)
                JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = k.attnum
                WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate AND i.indisvalid
                  -- A child may repeat its parent's keys.
                  AND (c.relkind = 'p' OR NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid))),
        'columns', (SELECT jsonb_agg(jsonb_build_object(
                        'name', a.attname, 'attnum', a.attnum, 'type', format_type(b.type, b.typmod), 'not_null',
                        a.attnotnull,
                        'labels', (SELECT string_agg(quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder)
                                   FROM pg_enum AS e WHERE e.enumtypid = b.type),
                        'collation', CASE WHEN l.collname = 'default' THEN pgtrickle._default_collation()
                                          ELSE l.collname END,
                        'deterministic', coalesce(l.collisdeterministic, true),
                        'generated', CASE WHEN a.attgenerated = 'v' THEN pg_get_expr(g.adbin, g.adrelid) END)
                            ORDER BY a.attnum)
                    FROM pg_attribute AS a
                    JOIN base AS b ON b.attnum = a.attnum
                    JOIN pg_type AS t ON t.oid = b.type AND t.typtype <> 'd'
                    LEFT JOIN pg_collation AS l ON l.oid = b.collation
                    LEFT JOIN pg_attrdef AS g ON g.adrelid = a.attrelid AND g.adnum = a.attnum
                    WHERE a.attrelid = c.oid))
    INTO found
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source;
    RETURN found || jsonb_build_object('shape', pgtrickle.stable_hash(found::text));
END
$$;

-- The table that had OID `relid` when this was database `node`, whatever its name is now. Otherwise the table with its
-- name: it was created again, or another database has taken the place of that one.
CREATE OR REPLACE FUNCTION pgtrickle._locate_table(node text, relid bigint, schema text, name text) RETURNS regclass
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found regclass := (SELECT c.oid FROM pg_class AS c
                       WHERE c.oid = relid::oid AND node = pgtrickle._database_identity());
BEGIN
    found := coalesce(found, to_regclass(format('%I.%I', schema, name)));
    IF found IS NULL THEN
        RAISE EXCEPTION 'database % no longer has a table %', quote_ident(current_database()),
                format('%I.%I', schema, name)
            USING ERRCODE = 'undefined_table', HINT = 'Refreshes continue when a table of that name exists.';
    END IF;
    RETURN found;
END
$$;

-- ALTER COLUMN … TYPE may compute new values, even without a new type, and no trigger fires. It rewrites the table and
-- the column's row in the catalog: if both have changed, it may have happened. Here no view prevents it.
CREATE OR REPLACE FUNCTION pgtrickle._rewrite_state(source regclass, columns smallint[]) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN ARRAY[
        (SELECT string_agg(concat(a.attnum, ':', a.xmin), ' ' ORDER BY a.attnum) FROM pg_attribute AS a
         WHERE a.attrelid = source AND a.attnum = ANY (columns)),
        (SELECT pgtrickle.stable_hash(string_agg(concat(member, ':', pg_relation_filenode(member)), ' '
                                                 ORDER BY member))
         FROM pgtrickle._partition_tree(source) AS member)];
END
$$;

-- A copy of a database (CREATE DATABASE … TEMPLATE, a restored dump) has the consumers of the original, which will
-- never advance here and would keep all changes. They are deleted; a consumer that reads this database from now on
-- subscribes again. Returns the name of the original, once; NULL if this is no copy. Claims of the original's services
-- end with their leases.
CREATE OR REPLACE FUNCTION pgtrickle._reset_copied_database() RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    original name;
    consumers integer;
BEGIN
    IF EXISTS (SELECT FROM pgtrickle.pgt_identity AS i WHERE i.node = pgtrickle._database_identity()) THEN
        RETURN NULL;
    END IF;
    SELECT i.database INTO original FROM pgtrickle.pgt_identity AS i
    WHERE i.node <> pgtrickle._database_identity() FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL; -- another session was first
    END IF;
    DELETE FROM pgtrickle.pgt_consumers;
    GET DIAGNOSTICS consumers = ROW_COUNT;
    DELETE FROM pgtrickle.pgt_broker_entries;
    UPDATE pgtrickle.pgt_identity SET node = pgtrickle._database_identity(), database = current_database(),
    noted_at = clock_timestamp();
    PERFORM pgtrickle._untrack_unused();
    PERFORM pgtrickle._emit_event('database_copied', NULL,
                                  jsonb_build_object('original', original, 'consumers', consumers));
    RETURN original;
END
$$;

-- Captures these columns for a stream table of another database. A repeated call updates capture.
CREATE OR REPLACE FUNCTION pgtrickle._subscribe(consumer text, label text, source regclass, columns smallint[])
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_administrator('read changes for another database');
    PERFORM pgtrickle._reset_copied_database(); -- or this consumer would be deleted with those of the original
    PERFORM pgtrickle._attach(source, columns);
    INSERT INTO pgtrickle.pgt_consumers
        AS c (consumer, source_relid, source_stable_name, columns_used, label, written_as)
    SELECT _subscribe.consumer, source, t.source_stable_name, columns, _subscribe.label,
           pgtrickle._rewrite_state(source, columns)
    FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source
    ON CONFLICT ON CONSTRAINT pgt_consumers_pkey
    DO UPDATE SET source_stable_name = excluded.source_stable_name, columns_used = excluded.columns_used,
    label = excluded.label,
                  written_as = excluded.written_as, snapshot = NULL, proof = NULL, former_proof = NULL,
                  seen_at = clock_timestamp();
END
$$;

-- The sources of these consumers as the cut sees them, with what each consumer left here.
CREATE OR REPLACE FUNCTION pgtrickle._consumer_sources(consumers text[])
RETURNS TABLE (consumer text, relid bigint, stable_name text, buffer name, buffered bigint, signature text, shape text,
               proof uuid, former_proof uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH sources AS MATERIALIZED (
        SELECT t.source_relid, t.source_stable_name, b.relname,
               pgtrickle._capture_signature(t.source_relid) AS signature,
               CASE WHEN pgtrickle._untrusted_cast(t.source_relid) IS NULL THEN
                    pgtrickle._describe_table(t.source_relid) ->> 'shape' ELSE 'untrusted' END AS shape,
               pg_relation_size(b.oid)
                   + coalesce((SELECT sum(pg_relation_size(h.inhrelid)) FROM pg_inherits AS h
                               WHERE h.inhparent = b.oid), 0)::bigint AS buffered
        FROM pgtrickle.pgt_change_tracking AS t
        JOIN pg_class AS c ON c.oid = t.source_relid
        JOIN pg_class AS b ON b.oid = t.buffer_relid
        WHERE t.source_relid IN (SELECT s.source_relid FROM pgtrickle.pgt_consumers AS s
                                 WHERE s.consumer = ANY (consumers))
    )
    SELECT c.consumer, s.source_relid::oid::bigint, s.source_stable_name, s.relname, s.buffered,
           CASE WHEN c.written_as[1] <> now.written_as[1] AND c.written_as[2] <> now.written_as[2] THEN 'rewritten'
                ELSE s.signature END,
           s.shape, c.proof, c.former_proof
    FROM pgtrickle.pgt_consumers AS c JOIN sources AS s USING (source_relid)
    CROSS JOIN LATERAL (SELECT pgtrickle._rewrite_state(s.source_relid, c.columns_used) AS written_as OFFSET 0) AS now
    WHERE c.consumer = ANY (consumers)
$$;

-- Changes with every start of the server and every crash, after which commits may have been lost.
CREATE OR REPLACE FUNCTION pgtrickle._incarnation() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT concat_ws(' ',
                     extract(epoch FROM pg_postmaster_start_time()), (SELECT extract(epoch FROM stats_reset)
                                                                      FROM pg_stat_bgwriter))
$$;

-- Stores a proof of this cut: `snapshots` are those up to which the consumers had stored changes before the cut that
-- leaves `new_proof`.
CREATE OR REPLACE FUNCTION pgtrickle._store_proof(
    consumers text[], snapshots pg_snapshot[], former_proofs uuid[], new_proof uuid, incarnation text)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    number integer;
BEGIN
    IF incarnation <> pgtrickle._incarnation() THEN
        RETURN -1; -- what the cut saw may have been lost
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true); -- makes everything that the cut saw durable
    UPDATE pgtrickle.pgt_consumers AS c
    SET snapshot = n.snapshot, former_proof = n.former, proof = new_proof, seen_at = clock_timestamp()
    FROM unnest(consumers, snapshots, former_proofs) AS n (consumer, snapshot, former)
    WHERE c.consumer = n.consumer;
    SELECT count(DISTINCT c.consumer) INTO number FROM pgtrickle.pgt_consumers AS c
    WHERE c.consumer = ANY (consumers) AND c.proof = new_proof;
    RETURN number;
END
$$;

-- Keeps only these consumers of a database, each with the tables that it reads.
CREATE OR REPLACE FUNCTION pgtrickle._keep_consumers(home text, consumers text[], relids bigint[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    number integer;
BEGIN
    DELETE FROM pgtrickle.pgt_consumers AS c
    WHERE starts_with(c.consumer, home || '/')
      AND (c.consumer, c.source_relid::oid::bigint) NOT IN (SELECT k.consumer, k.relid
                                                            FROM unnest(consumers, relids) AS k (consumer, relid));
    GET DIAGNOSTICS number = ROW_COUNT;
    DELETE FROM pgtrickle.pgt_broker_entries AS e
    WHERE e.home = _keep_consumers.home
      AND NOT EXISTS (SELECT FROM pgtrickle.pgt_consumers AS c
                      WHERE starts_with(c.consumer, e.home || '/') AND c.source_stable_name = e.source_stable_name);
    IF number > 0 THEN
        PERFORM pgtrickle._untrack_unused();
    END IF;
    RETURN number;
END
$$;

-- Whether there are changes for consumers, without a cut: the state that must be the same as at the last one, and the
-- transactions that made changes.
CREATE OR REPLACE FUNCTION pgtrickle._poll_consumers(consumers text[])
RETURNS TABLE (consumer text, state text, xids bigint[], relids bigint[], proofs text[])
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT c.consumer,
           concat_ws('|', pgtrickle._database_identity(), pgtrickle._incarnation(),
                     string_agg(concat_ws(':', s.oid, s.relname, s.relnamespace,
               pgtrickle._capture_signature(s.oid),
               (SELECT
                pgtrickle.stable_hash(string_agg(concat_ws(':', a.attnum, a.attname, a.atttypid, a.atttypmod,
                                                           a.attnotnull, a.xmin), ',' ORDER BY a.attnum))
                FROM pg_attribute AS a WHERE a.attrelid = s.oid AND a.attnum > 0)), ',' ORDER BY s.oid)),
           ARRAY(SELECT DISTINCT a.xid FROM pgtrickle_changes.pgt_activity AS a
                 WHERE a.source_stable_name = ANY (array_agg(c.source_stable_name))),
           array_agg(s.oid::bigint), array_agg(concat_ws(' ', c.proof, c.former_proof))
    FROM pgtrickle.pgt_consumers AS c JOIN pg_class AS s ON s.oid = c.source_relid
    WHERE c.consumer = ANY (consumers)
    GROUP BY c.consumer
$$;
