-- The capture triggers, created with the rights of the role that creates the stream table.

CREATE OR REPLACE FUNCTION pgtrickle._create_capture_trigger(relation regclass, operation text, stable_name text,
                                                             kind text)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER %s ON %s %s EXECUTE FUNCTION pgtrickle_changes.%I()',
        'pgtrickle_capture_' || lower(operation) || '_' || stable_name, operation, relation,
        CASE WHEN operation = 'TRUNCATE' THEN 'FOR EACH STATEMENT'
             WHEN kind = 'row' THEN 'FOR EACH ROW'
             WHEN operation = 'INSERT' THEN 'REFERENCING NEW TABLE AS __pgt_new FOR EACH STATEMENT'
             WHEN operation = 'UPDATE' THEN 'REFERENCING OLD TABLE AS __pgt_old NEW TABLE '
                                            'AS __pgt_new FOR EACH STATEMENT'
             ELSE 'REFERENCING OLD TABLE AS __pgt_old FOR EACH STATEMENT' END,
        'capture_' || stable_name);
END
$$;

-- The processes that a lock on the source and everything below it waits for.
CREATE OR REPLACE FUNCTION pgtrickle._lock_holders(source regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(string_agg(DISTINCT CASE
               WHEN l.pid IS NULL THEN 'a prepared transaction (see pg_prepared_xacts)'
               ELSE format('process %s (role %s)', l.pid, coalesce(a.usename, '?')) END, ', '),
               CASE WHEN pgtrickle._is_distributed(source) THEN 'a transaction on another node'
                    ELSE 'a process that has ended' END)
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.relation IN (SELECT pgtrickle._partition_tree(source)
                         UNION ALL SELECT buffer_relid FROM pgtrickle.pgt_change_tracking WHERE source_relid = source)
      AND l.mode NOT IN ('AccessShareLock', 'RowShareLock')
$$;

CREATE OR REPLACE FUNCTION pgtrickle._check_trigger_rights(source regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    relation regclass;
BEGIN
    FOR relation IN SELECT member FROM pgtrickle._partition_tree(source) AS member
        WHERE NOT has_table_privilege(member, 'TRIGGER') LOOP
        RAISE EXCEPTION 'role % has no TRIGGER privilege on %, whose changes are to be captured',
                quote_ident(current_user), relation
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('Ask its owner to run: GRANT TRIGGER ON %s TO %I;', relation, current_user);
    END LOOP;
END
$$;

-- Waits for the writers of the source and keeps new ones out. LOCK TABLE needs a privilege to write; a role that has
-- only TRIGGER gets the same lock by creating a trigger with a name that the capture function ignores.
CREATE OR REPLACE FUNCTION pgtrickle._lock_source(source regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stable_name text;
    relation regclass;
BEGIN
    IF has_table_privilege(source, 'UPDATE, DELETE, TRUNCATE') THEN
        EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', source);
        RETURN;
    END IF;
    SELECT t.source_stable_name INTO stable_name FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_relid = source;
    IF to_regprocedure(format('pgtrickle_changes.capture_%s()', stable_name)) IS NOT NULL THEN
        FOR relation IN SELECT pgtrickle._partition_tree(source) LOOP
            EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER TRUNCATE ON %s FOR EACH STATEMENT '
                           'EXECUTE FUNCTION pgtrickle_changes.%I()',
                           'pgtrickle_lock_' || stable_name, relation, 'capture_' || stable_name);
        END LOOP;
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._attach_triggers(source regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tracking record;
    wanted record;
    subscribed boolean := EXISTS (SELECT FROM pg_subscription_rel
                                  WHERE srrelid IN (SELECT pgtrickle._partition_tree(source)));
    covered boolean := false;
BEGIN
    SELECT * INTO STRICT tracking FROM pgtrickle.pgt_change_tracking WHERE source_relid = source;
    FOR wanted IN
        SELECT c.oid::regclass AS relation, pg_has_role(c.relowner, 'USAGE') AS owned, o.operation, t.tgname,
               t.tgenabled,
               'pgtrickle_capture_' || lower(o.operation) || '_' || tracking.source_stable_name AS name,
               -- PostgreSQL itself copies the row triggers of a partitioned table to its partitions.
               tracking.capture_kind = 'row' AND o.operation <> 'TRUNCATE' AND c.relispartition
                   AND c.oid <> source AS copied
        FROM pgtrickle._partition_tree(source) AS member
        JOIN pg_class AS c ON c.oid = member
        CROSS JOIN (VALUES ('INSERT'), ('UPDATE'), ('DELETE'), ('TRUNCATE')) AS o (operation)
        LEFT JOIN pg_trigger AS t ON t.tgrelid = c.oid
            AND t.tgname = 'pgtrickle_capture_' || lower(o.operation) || '_' || tracking.source_stable_name
        ORDER BY c.oid <> source, c.oid
    LOOP
        CONTINUE WHEN wanted.copied OR wanted.tgenabled = 'A' OR (wanted.tgenabled = 'O' AND NOT wanted.owned);
        IF subscribed AND NOT wanted.owned THEN
            RAISE EXCEPTION 'the changes of % arrive by logical replication, and only its '
                            'owner can have them captured',
                    wanted.relation
                USING ERRCODE = 'insufficient_privilege',
                      HINT = 'Let the owner of the table create the first stream table on it.';
        END IF;
        IF wanted.tgenabled IS DISTINCT FROM 'O' THEN
            PERFORM pgtrickle._create_capture_trigger(
                wanted.relation, wanted.operation, tracking.source_stable_name, tracking.capture_kind);
            covered := covered OR wanted.relation <> source;
        END IF;
        IF wanted.owned THEN
            EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', wanted.relation, wanted.name);
        END IF;
    END LOOP;
    IF covered THEN -- makes writers plan again that have cached the previous answer
        PERFORM pgtrickle._create_capture_trigger(source, 'TRUNCATE', tracking.source_stable_name,
                                                  tracking.capture_kind);
        IF (SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class AS c WHERE c.oid = source) THEN
            EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', source,
                           'pgtrickle_capture_truncate_' || tracking.source_stable_name);
        END IF;
    END IF;
    -- A detached partition keeps its triggers, which do nothing any more.
    FOR wanted IN
        SELECT t.tgrelid::regclass AS relation, t.tgname AS name
        FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
        WHERE t.tgfoid = to_regprocedure(format('pgtrickle_changes.capture_%s()', tracking.source_stable_name))
          AND t.tgrelid NOT IN (SELECT pgtrickle._partition_tree(source)) AND t.tgparentid = 0
          AND pg_has_role(c.relowner, 'USAGE')
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', wanted.name, wanted.relation);
    END LOOP;
END
$$;

-- Captures these columns of the source, besides those already tracked. Order: lock, buffer and function, triggers.
CREATE OR REPLACE FUNCTION pgtrickle._attach(source regclass, columns smallint[] DEFAULT '{}') RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former text := current_setting('lock_timeout');
    timeout text := pgtrickle._setting('lock_timeout_ms') || 'ms';
    stable_name text;
    of_citus boolean := pgtrickle._is_citus_source(source);
BEGIN
    IF NOT of_citus
       AND pgtrickle._gate('is_captured', jsonb_build_object('source', source::oid, 'columns', columns))::boolean THEN
        RETURN (SELECT source_stable_name FROM pgtrickle.pgt_change_tracking WHERE source_relid = source);
    END IF;
    PERFORM pgtrickle._check_trigger_rights(source);
    PERFORM set_config('lock_timeout', timeout, true);
    BEGIN
        IF of_citus THEN
            stable_name := pgtrickle._attach_shards(source);
        ELSE
            PERFORM pgtrickle._gate('grant_capture', jsonb_build_object('source', source::oid));
            PERFORM pgtrickle._lock_source(source);
            stable_name := pgtrickle._gate('track', jsonb_build_object('source', source::oid, 'columns', columns))
                ->> 0;
            PERFORM pgtrickle._attach_triggers(source);
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'could not lock % within %: held by %', source, timeout, pgtrickle._lock_holders(source)
            USING ERRCODE = 'lock_not_available',
                  HINT = 'Try again when the transaction has ended, or raise the setting lock_timeout_ms.';
    END;
    PERFORM set_config('lock_timeout', former, true);
    RETURN stable_name;
END
$$;

-- Restores capture after a rename, a new partition or a disabled trigger.
CREATE OR REPLACE FUNCTION pgtrickle._retrack(source regclass) RETURNS text
LANGUAGE sql
AS $$
    SELECT pgtrickle._attach(source)
$$;

-- The state of a source and everything below it: changes when a partition or child is attached or detached, when a
-- generated column is computed differently, and when a restart may have emptied an unlogged table.
CREATE OR REPLACE FUNCTION pgtrickle._partition_tree_state(source regclass, tree oid[]) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    RETURN concat_ws('|',
        (SELECT string_agg(concat_ws(' ', i.inhrelid, i.inhparent, i.xmin), ',' ORDER BY i.inhrelid, i.inhparent)
         FROM pg_inherits AS i WHERE i.inhparent = ANY (tree) OR i.inhrelid = source),
        (SELECT string_agg(concat_ws(' ', e.adrelid, e.adnum, e.xmin), ',' ORDER BY e.adrelid, e.adnum)
         FROM pg_attrdef AS e JOIN pg_attribute AS a ON a.attrelid = e.adrelid AND a.attnum = e.adnum
         WHERE e.adrelid = ANY (tree) AND a.attgenerated <> ''),
        (SELECT pg_postmaster_start_time()
         WHERE EXISTS (SELECT FROM pg_class AS c WHERE c.oid = ANY (tree) AND c.relpersistence = 'u')));
END
$$;

-- Changes whenever changes of the source may have been missed: a trigger disabled, missing or created again; a
-- partition or child attached or detached; a generated column computed differently; an unlogged table that a restart
-- may have emptied; one of `columns` renamed, retyped or dropped. Planning the query each time would take most of its
-- time.
CREATE OR REPLACE FUNCTION pgtrickle._capture_signature(source regclass, columns smallint[] DEFAULT '{}') RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    tree oid[] := ARRAY(SELECT pgtrickle._partition_tree(source));
    tracking record;
    capture oid;
BEGIN
    SELECT * INTO tracking FROM pgtrickle.pgt_change_tracking WHERE source_relid = source;
    IF tracking.capture_kind = 'shards' THEN
        RETURN pgtrickle._shard_signature(source, tracking.source_stable_name);
    END IF;
    capture := to_regprocedure(format('pgtrickle_changes.capture_%s()', tracking.source_stable_name));
    RETURN pgtrickle.stable_hash(concat_ws('|',
        source::oid, pgtrickle._capture_kind(source),
        (SELECT string_agg(concat_ws(' ', tgrelid, tgname, tgenabled, xmin), ',' ORDER BY tgrelid, tgname)
         FROM pg_trigger WHERE tgrelid = ANY (tree) AND tgfoid = capture AND tgname LIKE 'pgtrickle\_capture\_%'),
        pgtrickle._partition_tree_state(source, tree),
        (WITH RECURSIVE up (relid, edge) AS (
             SELECT inhparent, xmin::text FROM pg_inherits WHERE inhrelid = source
             UNION
             SELECT i.inhparent, i.xmin::text FROM up AS u JOIN pg_inherits AS i ON i.inhrelid = u.relid
         )
         SELECT string_agg(concat_ws(' ', relid, edge), ',' ORDER BY relid) FROM up),
        (SELECT string_agg(concat_ws(' ', attnum, attname, atttypid, atttypmod), ',' ORDER BY attnum)
         FROM pg_attribute WHERE attrelid = source AND attnum = ANY (columns) AND NOT attisdropped),
        pgtrickle._stored_columns(source, columns) <@ tracking.tracked_columns,
        (SELECT prosrc = pgtrickle._inert_body() FROM pg_proc WHERE oid = capture)));
END
$$;
