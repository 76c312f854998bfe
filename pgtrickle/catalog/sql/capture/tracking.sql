-- The change buffer and the capture function of a source: creating and updating them.

-- Who may have the changes of a table captured. The service updates capture through functions of a stream table's
-- owner.
CREATE OR REPLACE FUNCTION pgtrickle._require_trigger_right(caller name, source regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT (has_table_privilege(caller, source, 'TRIGGER')
            OR has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE')) THEN
        RAISE EXCEPTION 'role % has no TRIGGER privilege on %', quote_ident(caller), source
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('Ask the owner of %s to run: GRANT TRIGGER ON %s TO %I;', source, source, caller);
    END IF;
END
$$;

-- Writes the function only if it has changed: otherwise the plans that writers have cached stay valid.
CREATE OR REPLACE FUNCTION pgtrickle._write_capture_function(stable_name text, body text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    capture text := 'pgtrickle_changes.capture_' || stable_name || '()';
BEGIN
    IF EXISTS (SELECT FROM pg_proc WHERE oid = to_regprocedure(capture) AND prosrc = body
                                     AND 'search_path=pg_catalog, pg_temp' = ANY (proconfig)) THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE OR REPLACE FUNCTION %s RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
                   ' SET search_path = pg_catalog, pg_temp AS %L', capture, body);
    RETURN true;
END
$$;

-- CREATE TRIGGER needs EXECUTE on the function. Only roles that may create triggers on the source get it: attached to
-- another table, it would write into the source's buffer. Row triggers are copied by whoever creates a partition; they
-- check themselves which table they are on.
CREATE OR REPLACE FUNCTION pgtrickle._grant_capture(caller name, source regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    capture regprocedure;
    role name;
BEGIN
    PERFORM pgtrickle._require_trigger_right(caller, source);
    SELECT to_regprocedure(format('pgtrickle_changes.capture_%s()', t.source_stable_name)) INTO capture
    FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source AND t.capture_kind <> 'row';
    IF capture IS NULL THEN
        RETURN;
    END IF;
    PERFORM pgtrickle._lock('track ' || source::oid);
    FOR role IN
        SELECT pg_get_userbyid(a.grantee) FROM pg_proc AS p
        CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
        WHERE p.oid = capture AND a.grantee NOT IN (0, p.proowner)
          AND NOT has_table_privilege(a.grantee, source, 'TRIGGER')
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %I', capture, role);
    END LOOP;
    IF (SELECT EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
                       WHERE a.grantee = 0) FROM pg_proc AS p WHERE p.oid = capture) THEN
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', capture);
    END IF;
    FOR role IN
        SELECT r.rolname FROM pg_roles AS r JOIN pg_class AS c ON c.oid = source
        WHERE (r.rolname = caller OR r.oid = c.relowner) AND NOT has_function_privilege(r.oid, capture, 'EXECUTE')
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', capture, role);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._forget_source(stable_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
BEGIN
    -- Dropping the function drops its triggers, whoever owns the table.
    PERFORM pgtrickle._drop_capture_function(stable_name);
    EXECUTE format('DROP TABLE IF EXISTS pgtrickle_changes.%I, pgtrickle_changes.%I', 'spare_' || stable_name,
                   'changes_' || stable_name);
    DELETE FROM pgtrickle_changes.pgt_markers AS m WHERE m.source_stable_name = stable_name;
    DELETE FROM pgtrickle_changes.pgt_activity AS a WHERE a.source_stable_name = stable_name;
    DELETE FROM pgtrickle.pgt_locks AS l USING pgtrickle.pgt_change_tracking AS t
    WHERE t.source_stable_name = stable_name AND l.name = 'track ' || t.source_relid::oid;
    DELETE FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_stable_name = stable_name;
END
$$;

-- The name under which changes of a table are stored: a hash of its name, or another one if that is taken by a renamed
-- table or by one whose name has the same hash. Such names can be computed on purpose.
CREATE OR REPLACE FUNCTION pgtrickle._stable_name(source regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(
        (SELECT t.source_stable_name FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source),
        (SELECT h.hash
         FROM generate_series(1, 1 + (SELECT count(*) FROM pgtrickle.pgt_change_tracking)) AS number
         CROSS JOIN LATERAL (SELECT pgtrickle.stable_hash(format('%I.%I', n.nspname, c.relname)
                                                          || coalesce(' ' || nullif(number, 1), ''))) AS h (hash)
         WHERE NOT EXISTS (SELECT FROM pgtrickle.pgt_change_tracking AS t
                           JOIN pg_class AS other ON other.oid = t.source_relid
                           WHERE t.source_stable_name = h.hash)
         ORDER BY number LIMIT 1))
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source
$$;

-- Under the given stable name, or one of its own.
CREATE OR REPLACE FUNCTION pgtrickle._begin_tracking(source regclass, kind text, given_name text DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stable_name text := coalesce(given_name, pgtrickle._stable_name(source));
    buffer text := 'pgtrickle_changes.changes_' || stable_name;
    taken_by oid;
BEGIN
    SELECT source_relid INTO taken_by FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_stable_name = stable_name;
    IF taken_by IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        -- An old snapshot does not see who has begun to use it.
        RAISE EXCEPTION '% cannot be tracked in a % transaction', source,
                current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction',
                  HINT = 'Create the stream table in a READ COMMITTED transaction.';
    ELSIF EXISTS (SELECT FROM pg_class WHERE oid = taken_by) AND NOT pgtrickle._is_unused(stable_name) THEN
        RAISE EXCEPTION '% cannot be tracked: the changes of %, which had that name before, are stored under it',
                source, taken_by::regclass
            USING ERRCODE = 'duplicate_object',
                  HINT = format('Drop the stream tables that read %s, or give one of the two tables another name.',
                                taken_by::regclass);
    ELSIF taken_by IS NOT NULL THEN
        PERFORM pgtrickle._forget_source(stable_name);
    END IF;
    -- Two tables, written in turn, so that one can be emptied; reading the first reads both. Rows are only added,
    -- until all are removed at once. NOT NULL would be checked for every row, which takes a twelfth of the time of
    -- capturing many.
    EXECUTE format('CREATE TABLE %s (__pgt_xid bigint, __pgt_w smallint) WITH (autovacuum_enabled = off)', buffer);
    EXECUTE format('CREATE TABLE pgtrickle_changes.%I () INHERITS (%s) WITH (autovacuum_enabled = off)',
                   'spare_' || stable_name, buffer);
    EXECUTE format('CREATE SEQUENCE pgtrickle_changes.%I OWNED BY %s.__pgt_xid', 'turn_' || stable_name, buffer);
    PERFORM setval(format('pgtrickle_changes.%I', 'turn_' || stable_name)::regclass, 1);
    PERFORM pgtrickle._protect(part) FROM pgtrickle._partition_tree(buffer::regclass) AS part;
    IF pgtrickle._service_role() <> current_user THEN
        EXECUTE format('GRANT SELECT, DELETE ON %s TO %I', buffer, pgtrickle._service_role());
    END IF;
    INSERT INTO pgtrickle.pgt_change_tracking (source_relid, source_stable_name, buffer_relid, tracked_columns,
                                               capture_kind)
    VALUES (source, stable_name, buffer::regclass, '{}', kind);
    RETURN stable_name;
END
$$;

-- Whether the source is captured as it should be, with these columns. If so, nobody can end that before the end of the
-- transaction, and another stream table needs no lock on the source.
CREATE OR REPLACE FUNCTION pgtrickle._is_captured(caller name, source regclass, columns smallint[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tracking record;
BEGIN
    IF NOT has_any_column_privilege(caller, source, 'SELECT') THEN
        PERFORM pgtrickle._require_trigger_right(caller, source);
    END IF;
    SELECT t.*, to_regprocedure(format('pgtrickle_changes.capture_%s()', t.source_stable_name)) AS capture
           INTO tracking
    FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source FOR KEY SHARE;
    RETURN FOUND
        AND tracking.capture_kind = pgtrickle._capture_kind(source)
        AND tracking.tracked_columns = pgtrickle._stored_columns(source, tracking.tracked_columns || columns)
        AND EXISTS (SELECT FROM pg_proc WHERE oid = tracking.capture AND prosrc = pgtrickle._capture_body(
                source, tracking.source_stable_name, tracking.tracked_columns, tracking.capture_kind))
        AND NOT EXISTS (
            SELECT FROM pgtrickle._partition_tree(source) AS member
            WHERE 4 <> (SELECT count(*) FROM pg_trigger WHERE tgrelid = member AND tgfoid = tracking.capture
                        AND tgname LIKE 'pgtrickle\_capture\_%' AND tgenabled IN ('O', 'A')))
        AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgfoid = tracking.capture
                          AND tgrelid NOT IN (SELECT pgtrickle._partition_tree(source)));
END
$$;

-- Makes buffer and capture function fit the current source, adding these columns to the tracked ones. The caller holds
-- SHARE ROW EXCLUSIVE on the source, or its triggers do not exist yet. Returns the source's stable name.
CREATE OR REPLACE FUNCTION pgtrickle._track(caller name, source regclass, columns smallint[]) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    kind text := pgtrickle._capture_kind(source);
    tracking record;
    wanted smallint[];
    changes text[] := '{}';
    col record;
    lossy boolean := false;
BEGIN
    PERFORM pgtrickle._require_trigger_right(caller, source);
    -- If two sessions begin with the same source, the second finds what the first created.
    PERFORM pgtrickle._lock('track ' || source::oid);
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_change_tracking WHERE source_relid = source) THEN
        PERFORM pgtrickle._begin_tracking(source, kind);
    END IF;
    SELECT * INTO STRICT tracking FROM pgtrickle.pgt_change_tracking WHERE source_relid = source FOR NO KEY UPDATE;
    wanted := pgtrickle._stored_columns(source, tracking.tracked_columns || columns);

    FOR col IN
        SELECT b.attname, w.attnum,
               CASE WHEN b.attnum IS NOT NULL THEN pgtrickle._buffer_type(b.attrelid, b.attnum) END AS has,
               CASE WHEN w.attnum IS NOT NULL THEN pgtrickle._buffer_type(source, w.attnum) END AS needs
        FROM unnest(wanted) AS w (attnum)
        FULL JOIN (SELECT * FROM pg_attribute WHERE attrelid = tracking.buffer_relid AND attnum > 2
                     AND NOT attisdropped) AS b
            ON b.attname = 'c' || w.attnum
        ORDER BY w.attnum
    LOOP
        CONTINUE WHEN col.has = col.needs;
        IF col.has IS NOT NULL THEN
            changes := changes || format('DROP COLUMN %I', col.attname);
            lossy := true;
        END IF;
        IF col.needs IS NOT NULL THEN
            changes := changes || format('ADD COLUMN c%s %s', col.attnum, col.needs);
        END IF;
    END LOOP;
    IF changes <> '{}' THEN
        EXECUTE format('ALTER TABLE %s %s', tracking.buffer_relid, array_to_string(changes, ', '));
        PERFORM pgtrickle._protect(part) FROM pgtrickle._partition_tree(tracking.buffer_relid) AS part;
    END IF;
    IF lossy THEN
        PERFORM pgtrickle._mark(tracking.source_stable_name, 'SCHEMA');
    END IF;
    IF kind <> tracking.capture_kind THEN
        PERFORM pgtrickle._drop_capture_function(tracking.source_stable_name);
    END IF;
    PERFORM pgtrickle._write_capture_function(
        tracking.source_stable_name, pgtrickle._capture_body(source, tracking.source_stable_name, wanted, kind));
    IF (tracking.tracked_columns, tracking.capture_kind) IS DISTINCT FROM (wanted, kind) THEN
        UPDATE pgtrickle.pgt_change_tracking SET tracked_columns = wanted, capture_kind = kind
        WHERE source_relid = source;
    END IF;
    PERFORM pgtrickle._grant_capture(caller, source);
    RETURN tracking.source_stable_name;
END
$$;
