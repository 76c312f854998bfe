-- Removal of changes that nobody needs any more.
--
-- A buffer is two tables: writers fill one until it is large, then the other, and the one they left is truncated when
-- every stream table on the source has passed all its rows. Nothing is deleted, so nothing bloats while an old
-- snapshot keeps vacuum from working, and a refresh scans little more than the new rows.
--
-- TRUNCATE also removes rows from old snapshots. That is harmless here: readers of a buffer skip what their frontier
-- has seen, and a table is truncated only when all frontiers have seen all of it.

-- Truncates the table that writers have left, unless a transaction that some frontier has not seen has rows in it: one
-- from `bound` on, or one of `running`. `upto` is a transaction that began after writers left the table, if known: it
-- makes reading the rows unnecessary, unless a transaction that is still running may be among them. Writers use the
-- other table, but new cuts queue behind the lock: it is waited for 20 ms per megabyte to be freed, at most a second,
-- so that many readers do not prevent it forever. `kept_upto` is the last transaction that keeps the table, if there
-- is one.
CREATE OR REPLACE FUNCTION pgtrickle._empty_buffer(
    part regclass, bound bigint, running bigint[], upto bigint, OUT freed bigint, OUT kept_upto bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '20ms'
AS $$
DECLARE
    size bigint := pg_relation_size(part);
    passed boolean := upto < (SELECT min(xid) FROM unnest(running || bound) AS xid);
    look text := format('SELECT max(__pgt_xid) FROM ONLY %s WHERE __pgt_xid >= $1 OR __pgt_xid = ANY ($2)', part);
BEGIN
    freed := 0;
    IF size = 0 THEN
        RETURN;
    END IF;
    IF passed IS NOT TRUE THEN
        EXECUTE look INTO kept_upto USING bound, running;
    END IF;
    IF kept_upto IS NULL THEN
        -- With the lock, no open transaction has rows in the table. Rows that came after the first query are
        -- committed, and a new statement sees them.
        PERFORM set_config('lock_timeout', least(1000, 20 + 20 * (size / 1048576)) || 'ms', true);
        EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', part);
        IF passed IS NOT TRUE THEN
            EXECUTE look INTO kept_upto USING bound, running;
        END IF;
    END IF;
    IF kept_upto IS NULL THEN
        EXECUTE format('TRUNCATE ONLY %s', part);
        freed := size;
    END IF;
EXCEPTION WHEN lock_not_available THEN
    -- A transaction that wrote or reads the table is still open.
    freed := 0;
    kept_upto := upto;
END
$$;

-- Records, when writers have been switched to the other table, a transaction ID later than all that may have rows in
-- the one they left. A writer has its transaction ID before it asks where to write; a subtransaction that begins now
-- gets a later one.
CREATE OR REPLACE FUNCTION pgtrickle._record_buffer_switch(stable_name text, turn bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    round CONSTANT bigint := 4294967296; -- xmin is the lower half of a transaction ID
    mine bigint := pg_current_xact_id()::text::bigint;
    later bigint;
BEGIN
    BEGIN
        UPDATE pgtrickle.pgt_change_tracking AS t SET left_turn = turn, left_at = NULL
        WHERE t.source_stable_name = stable_name RETURNING t.xmin::text::bigint INTO later;
    EXCEPTION WHEN lock_not_available THEN
        RAISE; -- the EXCEPTION clause makes this a subtransaction
    END;
    later := mine + (later - mine % round + round) % round;
    UPDATE pgtrickle.pgt_change_tracking AS t SET left_at = later WHERE t.source_stable_name = stable_name;
    RETURN later;
END
$$;

-- After a refresh: removes changes that every stream table on the source has passed, and returns the number of bytes
-- freed. A refresh must not wait or fail for it: if a lock is not available, or another process is purging, the next
-- refresh tries again.
CREATE OR REPLACE FUNCTION pgtrickle._purge(stable_name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '20ms'
AS $$
DECLARE
    -- Scanned in a few milliseconds, and a hundred times the cost of writing a TRUNCATE.
    large CONSTANT bigint := 1024 * 1024;
    turn regclass := to_regclass('pgtrickle_changes.turn_' || stable_name);
    parts regclass[] := ARRAY[to_regclass('pgtrickle_changes.changes_' || stable_name),
                              to_regclass('pgtrickle_changes.spare_' || stable_name)];
    number bigint;
    written int;
    known record;
    quiet boolean;
    kept record;
    emptied record;
    freed bigint := 0;
BEGIN
    -- An old snapshot would not see recent changes.
    IF turn IS NULL OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RETURN 0;
    END IF;
    PERFORM FROM pgtrickle.pgt_change_tracking AS t
    WHERE t.source_stable_name = stable_name FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    -- Above the limit, readers that have not been seen for long are not waited for: they will re-initialize.
    IF (SELECT sum(pg_stat_get_live_tuples(part)) FROM unnest(parts) AS part)
        > pgtrickle._setting('max_buffer_rows')::bigint THEN
        UPDATE pgtrickle.pgt_consumers AS c SET snapshot = NULL, proof = NULL, former_proof = NULL
        WHERE c.source_stable_name = stable_name AND c.proof IS NOT NULL
          AND c.seen_at < clock_timestamp() - interval '10 minutes';
        UPDATE pgtrickle.pgt_stream_tables AS s
        SET reinit_reason = CASE WHEN s.status = 'SUSPENDED' THEN
                                 'more than max_buffer_rows changes accumulated while it was suspended'
                                 ELSE 'more than max_buffer_rows changes accumulated while it was not refreshed' END
        WHERE (s.status = 'SUSPENDED' OR s.tier = 'frozen' OR s.data_timestamp < clock_timestamp() - interval '1 day')
          AND s.frontier IS NOT NULL AND s.reinit_reason IS NULL
          AND EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d
                      WHERE d.pgt_id = s.pgt_id AND d.source_stable_name = stable_name);
    END IF;
    -- A stream table in its initial population has taken its cut, but its frontier is not stored yet: it will need
    -- every change from then on. If its process died, the next refresh takes the claim over. A refresh that begins
    -- after this statement needs nothing that this statement's snapshot has seen, and so counts as one more reader
    -- with that frontier.
    WITH readers AS (
        SELECT s.frontier IS NULL OR s.reinit_reason IS NOT NULL OR s.frontier ->> 'node' <> n.node AS starts_over,
               s.claimed_by IS NOT NULL AS claimed, (s.frontier ->> 'snapshot')::pg_snapshot AS snapshot
        FROM pgtrickle.pgt_dependencies AS d
        JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
        CROSS JOIN (SELECT c.system_identifier || '/' || b.oid AS node FROM pg_control_system() AS c
                    JOIN pg_database AS b ON b.datname = current_database()) AS n
        WHERE d.source_stable_name = stable_name AND d.source_type <> 'DISTRIBUTED' -- the coordinator computes those
        UNION ALL
        -- Stream tables of other databases: one that has stored nothing yet may be in its initial population.
        SELECT c.snapshot IS NULL, c.proof IS NOT NULL
               OR c.seen_at > clock_timestamp() - interval '10 minutes', c.snapshot
        FROM pgtrickle.pgt_consumers AS c WHERE c.source_stable_name = stable_name
        UNION ALL
        SELECT false, false, pg_current_snapshot()
    )
    SELECT bool_or(starts_over AND claimed) AS filling,
           min(pg_snapshot_xmax(snapshot)::text::bigint) FILTER (WHERE NOT starts_over) AS bound,
           ARRAY(SELECT DISTINCT xid::text::bigint FROM readers AS r CROSS JOIN pg_snapshot_xip(r.snapshot) AS xid
                 WHERE NOT r.starts_over) AS running
    INTO known FROM readers;
    IF known.filling THEN
        RETURN 0;
    END IF;
    -- A snapshot does not list its own transaction as running.
    known.running := array_remove(known.running || pg_current_xact_id_if_assigned()::text::bigint, NULL);
    DELETE FROM pgtrickle_changes.pgt_markers
    WHERE source_stable_name = stable_name AND xid < known.bound AND xid <> ALL (known.running);
    DELETE FROM pgtrickle_changes.pgt_activity
    WHERE source_stable_name = stable_name AND xid < known.bound AND xid <> ALL (known.running);

    quiet := NOT EXISTS (SELECT FROM pgtrickle_changes.pgt_activity AS a WHERE a.source_stable_name = stable_name);

    number := coalesce(pg_sequence_last_value(turn), 1);
    written := 2 - number % 2;
    SELECT t.kept_upto AS upto, CASE WHEN t.left_turn = number THEN t.left_at END AS left_at INTO kept
    FROM pgtrickle.pgt_change_tracking AS t WHERE t.source_stable_name = stable_name;
    IF quiet OR kept.upto IS NULL OR kept.upto < known.bound AND kept.upto <> ALL (known.running) THEN
        emptied := pgtrickle._empty_buffer(parts[3 - written], known.bound, known.running, kept.left_at);
        freed := emptied.freed;
        IF pg_relation_size(parts[written]) >= large AND pg_relation_size(parts[3 - written]) = 0 THEN
            PERFORM setval(turn, number + 1); -- at once and for everybody, even if this transaction is rolled back
            emptied.kept_upto := pgtrickle._record_buffer_switch(stable_name, number + 1);
            IF quiet THEN
                emptied := pgtrickle._empty_buffer(parts[written], known.bound, known.running, NULL);
                freed := freed + emptied.freed;
            END IF;
        END IF;
        UPDATE pgtrickle.pgt_change_tracking AS t SET kept_upto = emptied.kept_upto
        WHERE t.source_stable_name = stable_name AND t.kept_upto IS DISTINCT FROM emptied.kept_upto;
    END IF;
    RETURN freed;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END
$$;
