-- For the operator of a Citus cluster: is every node captured and polled, and who is working on what?

-- What a node has of each source: its shards there, those that lack a trigger, and the changes in its buffer.
CREATE OR REPLACE FUNCTION pgtrickle._node_report() RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_object_agg(t.source_relid::regclass::text, jsonb_build_object(
               'shards', h.number, 'missing', h.missing,
               'waiting', (SELECT sum(pg_stat_get_live_tuples(b))
                           FROM pgtrickle._partition_tree(t.buffer_relid) AS b))), '{}')
    FROM pgtrickle.pgt_change_tracking AS t
    CROSS JOIN LATERAL (
        SELECT count(*) AS number,
               coalesce(sum(4 - least(4, (SELECT count(*) FROM pg_trigger AS g
                                          WHERE g.tgrelid = c.relation AND g.tgenabled = 'O'
                                            AND g.tgfoid = to_regprocedure(format('pgtrickle_changes.capture_%s()',
                                                                                  t.source_stable_name))))), 0)
                   AS missing
        FROM pgtrickle._local_capture_targets(t.source_relid) AS c
    ) AS h
    WHERE t.capture_kind = 'shards' AND EXISTS (SELECT FROM pg_class AS r WHERE r.oid = t.source_relid)
$$;

CREATE OR REPLACE FUNCTION pgtrickle._citus_status()
RETURNS TABLE (node text, host text, port integer, source text, placement text, distribution_column text,
               shards bigint, triggers_missing bigint, waiting_changes bigint,
               lag interval, problem text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    member record;
    report jsonb;
BEGIN
    IF NOT pgtrickle._has_citus() OR pgtrickle._citus_group() <> 0 THEN
        RETURN;
    END IF;
    FOR member IN
        SELECT n.*, coalesce(r.success, n.groupid = 0) AS success, r.result, k.clear_at, k.problem AS known_problem,
               k.groupid IS NOT NULL AS known
        FROM pgtrickle._citus_nodes() AS n
        LEFT JOIN run_command_on_workers('SELECT pgtrickle._node_report()') AS r
            ON (r.nodename, r.nodeport) = (n.host, n.port)
        LEFT JOIN pgtrickle._followed_nodes() AS k ON k.groupid = n.groupid
        ORDER BY n.groupid
    LOOP
        node := CASE member.groupid WHEN 0 THEN 'coordinator' ELSE pgtrickle._node_name(member.groupid) END;
        host := member.host;
        port := member.port;
        lag := clock_timestamp() - member.clear_at;
        problem := CASE WHEN NOT member.success THEN member.result
                        WHEN member.groupid <> 0
                            AND NOT member.known THEN 'not captured yet: the next refresh captures it'
                        ELSE member.known_problem END;
        report := CASE WHEN member.groupid = 0 THEN pgtrickle._node_report()
                       WHEN member.success THEN member.result::jsonb END;
        IF report IS NULL OR report = '{}' THEN
            source := NULL; placement := NULL; distribution_column := NULL; shards := NULL; triggers_missing := NULL;
                waiting_changes := NULL;
            RETURN NEXT;
            CONTINUE;
        END IF;
        FOR source, shards, triggers_missing, waiting_changes IN
            SELECT r.key, r.value -> 'shards', r.value -> 'missing', r.value -> 'waiting' FROM jsonb_each(report) AS r
            ORDER BY 1
        LOOP
            placement := pgtrickle._citus_placement(to_regclass(source));
            distribution_column := pgtrickle._distribution_column(to_regclass(source));
            RETURN NEXT;
        END LOOP;
    END LOOP;
END
$$;

CREATE OR REPLACE VIEW pgtrickle.citus_status AS SELECT * FROM pgtrickle._citus_status();
COMMENT ON VIEW pgtrickle.citus_status IS 'Nodes of the Citus cluster and what is captured '
                                          'there. Empty in a database without Citus.';

-- Locks are rows with a lease: they are valid in the whole cluster, and end with their process.
CREATE OR REPLACE VIEW pgtrickle.st_locks AS
    SELECT s.pgt_id, h.pid AS locked_by, h.host AS locked_on, h.lease_expires AS held_until,
           h.lease_expires < clock_timestamp() AS stale
    FROM pgtrickle.pgt_stream_tables AS s JOIN pgtrickle.pgt_services AS h ON h.service_id = s.claimed_by;
COMMENT ON VIEW pgtrickle.st_locks IS 'Stream tables that a process is refreshing, or was when it died.';
