-- The nodes of the cluster as databases from which distributed tables are read.

CREATE OR REPLACE FUNCTION pgtrickle._register_node(groupid integer, dsn text, node text,
                                                    registered_by name DEFAULT current_user) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO pgtrickle.pgt_databases AS d (name, dsn, node, roles, registered_by, citus_group)
    VALUES (pgtrickle._node_name(groupid), dsn, node, '{}', _register_node.registered_by, groupid)
    ON CONFLICT ON CONSTRAINT pgt_databases_pkey DO UPDATE SET dsn = excluded.dsn, node = excluded.node;
    INSERT INTO pgtrickle.pgt_database_sets AS s (name, members, registered_by)
    VALUES ('@cluster', ARRAY[pgtrickle._node_name(groupid)], _register_node.registered_by)
    ON CONFLICT (name) DO UPDATE SET members = CASE WHEN pgtrickle._node_name(groupid) = ANY (s.members) THEN s.members
                                                    ELSE s.members || pgtrickle._node_name(groupid) END;
END
$$;

-- From now on a distributed table is read from all nodes.
CREATE OR REPLACE FUNCTION pgtrickle._read_from_nodes(caller name, source regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known record;
    groups bigint;
    placed bigint;
BEGIN
    IF NOT pgtrickle._is_distributed(source) OR pgtrickle._citus_group() <> 0 THEN
        RAISE EXCEPTION '% is not a distributed table of this coordinator', source
            USING ERRCODE = 'wrong_object_type', HINT = 'Only rows of such a table are read from other nodes.';
    END IF;
    PERFORM pgtrickle._require_trigger_right(caller, source);
    groups := pgtrickle._groups_issued();
    placed := pgtrickle._last_placement_id(source);
    SELECT t.* INTO known FROM pgtrickle.pgt_sharded_tables AS t WHERE t.relid = source;
    IF known.prepared_group <> groups AND known.placed_upto IS DISTINCT FROM placed THEN
        UPDATE pgtrickle.pgt_stream_tables AS s
        SET reinit_reason = format('shards of %s were moved while a new node did not capture them', source)
        WHERE s.frontier IS NOT NULL
          AND EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.pgt_id = s.pgt_id AND d.through = source);
    END IF;
    INSERT INTO pgtrickle.pgt_database_sets AS s (name, registered_by)
    VALUES ('@cluster', caller) ON CONFLICT DO NOTHING;
    INSERT INTO pgtrickle.pgt_sharded_tables
        AS t (relid, database_set, source_schema, source_name, prepared_group, placed_upto)
    SELECT source, '@cluster', n.nspname, c.relname, groups, placed
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = source
    ON CONFLICT (relid) DO UPDATE SET source_schema = excluded.source_schema, source_name = excluded.source_name,
                                      prepared_group = excluded.prepared_group, placed_upto = excluded.placed_upto;
    PERFORM pgtrickle._update_shards(source,
                                     ARRAY(SELECT pgtrickle._node_name(n.groupid) FROM pgtrickle._citus_nodes() AS n
                                           WHERE n.groupid <> 0));
    IF known.relid IS NULL THEN -- also if there are no other nodes
        PERFORM pgtrickle._register_sources(s.pgt_id) FROM pgtrickle.pgt_stream_tables AS s
        WHERE EXISTS (SELECT FROM pgtrickle._sources(s.view_relid) AS u WHERE u.relation = source);
    END IF;
END
$$;

-- The number of node groups that ever existed: one that came and went between two calls may have had shards.
CREATE OR REPLACE FUNCTION pgtrickle._groups_issued() RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT q.last_value FROM pg_dist_groupid_seq AS q);
END
$$;

-- The last placement of a shard of a table: a new one after every move.
CREATE OR REPLACE FUNCTION pgtrickle._last_placement_id(relation regclass) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT max(p.placementid) FROM pg_dist_shard AS s JOIN pg_dist_placement AS p USING (shardid)
            WHERE s.logicalrelid = relation);
END
$$;

-- Shards that moved while all nodes captured them need no re-initialization.
CREATE OR REPLACE FUNCTION pgtrickle._record_placements() RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE pgtrickle.pgt_sharded_tables AS t SET placed_upto = pgtrickle._last_placement_id(t.relid)
    WHERE t.database_set = '@cluster' AND t.prepared_group = pgtrickle._groups_issued()
      AND t.placed_upto IS DISTINCT FROM pgtrickle._last_placement_id(t.relid)
$$;

-- Removes nodes that have left the cluster and that no table is read from.
CREATE OR REPLACE FUNCTION pgtrickle._forget_nodes() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    gone record;
    stand_in record;
BEGIN
    FOR gone IN
        SELECT d.name FROM pgtrickle.pgt_databases AS d
        WHERE d.citus_group IS NOT NULL AND d.citus_group NOT IN (SELECT n.groupid FROM pgtrickle._citus_nodes() AS n)
          AND NOT EXISTS (SELECT FROM pgtrickle.pgt_shards AS m WHERE m.database = d.name)
    LOOP
        FOR stand_in IN DELETE FROM pgtrickle.pgt_foreign_tables AS f WHERE f.database = gone.name
            RETURNING f.relid LOOP
            EXECUTE format('DROP TABLE IF EXISTS %s', stand_in.relid);
        END LOOP;
        PERFORM pgtrickle._drop_empty_schemas(gone.name);
        UPDATE pgtrickle.pgt_database_sets AS s SET members = array_remove(s.members, gone.name)
        WHERE s.name = '@cluster';
        DELETE FROM pgtrickle.pgt_databases AS d WHERE d.name = gone.name;
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._is_read_from_nodes(relation regclass) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle.pgt_sharded_tables AS t
                   WHERE t.relid = relation AND t.database_set = '@cluster')
$$;

-- A node that has shards of a distributed table and that the table is not read from. The coordinator always is.
CREATE OR REPLACE FUNCTION pgtrickle._unread_node(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF relation IS NULL OR NOT pgtrickle._is_read_from_nodes(relation) THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT min(pgtrickle._node_name(p.groupid)) FROM pg_dist_shard AS s JOIN pg_dist_placement AS p
            USING (shardid)
            WHERE s.logicalrelid = relation AND p.shardstate = 1 AND p.groupid <> 0
              AND NOT EXISTS (SELECT FROM pgtrickle.pgt_shards AS m
                              WHERE m.relid = relation AND m.database = pgtrickle._node_name(p.groupid)));
END
$$;

-- Distributed tables that are not read from all nodes of the cluster at their current addresses, or that are read from
-- a node that has left.
CREATE OR REPLACE FUNCTION pgtrickle._outdated_distributed_tables() RETURNS SETOF regclass
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT pgtrickle._has_citus() THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT t.relid FROM pgtrickle.pgt_sharded_tables AS t
    WHERE t.database_set = '@cluster' AND pgtrickle._is_distributed(t.relid)
      AND (t.prepared_group IS DISTINCT FROM pgtrickle._groups_issued()
           OR ARRAY(SELECT m.database FROM pgtrickle.pgt_shards AS m WHERE m.relid = t.relid ORDER BY 1)
              <> ARRAY(SELECT pgtrickle._node_name(n.groupid) AS name FROM pgtrickle._citus_nodes() AS n
                       WHERE n.groupid <> 0 ORDER BY 1)
           OR EXISTS (SELECT FROM pgtrickle._citus_nodes() AS n
                      JOIN pgtrickle.pgt_databases AS d ON d.citus_group = n.groupid
                      WHERE d.dsn <> format('host=%s port=%s', n.host, n.port)));
END
$$;

-- Binds stream tables again whose sources have moved in the cluster since the last call, or were re-created by Citus,
-- which also re-creates the views on them. Returns the tables captured through Citus, whose capture the caller has to
-- check.
CREATE OR REPLACE FUNCTION pgtrickle._follow_placements(ids bigint[]) RETURNS TABLE (id bigint, relation regclass)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stream_table record;
BEGIN
    IF NOT pgtrickle._has_citus() THEN
        RETURN;
    END IF;
    FOR stream_table IN
        SELECT s.pgt_id, to_regclass('pgtrickle_views.q_' || s.pgt_id) AS view, s.view_relid, s.through_coordinator
        FROM pgtrickle.pgt_stream_tables AS s
        WHERE s.pgt_id = ANY (ids)
    LOOP
        CONTINUE WHEN stream_table.view IS NULL;
        CONTINUE WHEN stream_table.view = stream_table.view_relid AND NOT EXISTS (
               SELECT FROM pgtrickle.pgt_dependencies AS d
               LEFT JOIN pgtrickle.pgt_change_tracking AS t ON t.source_relid = d.source_relid
               WHERE d.pgt_id = stream_table.pgt_id
                 AND (d.source_placement IS DISTINCT FROM
                      pgtrickle._citus_placement(coalesce(d.through, d.source_relid))
                      OR d.source_placement IN ('distributed', 'single_shard') AND d.through IS NULL
                      AND NOT stream_table.through_coordinator
                      OR NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = d.source_relid)
                      OR t.capture_kind = 'statement' AND pgtrickle._is_citus_source(d.source_relid)
                      -- an earlier attempt failed
                      OR t.capture_kind IS NULL AND d.source_type IN ('TABLE', 'PARTITIONED')
                      AND pgtrickle._is_citus_source(d.source_relid)
                      OR pgtrickle._unread_node(d.through) IS NOT NULL
                      -- Created by an earlier version, which did not read the coordinator.
                      OR pgtrickle._is_read_from_nodes(d.through)
                      AND NOT EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS h
                                                                         WHERE h.pgt_id = d.pgt_id
                                                                           AND h.source_relid = d.through)));
        -- A table that is no longer distributed is read here again.
        DELETE FROM pgtrickle.pgt_sharded_tables AS t
        WHERE t.database_set = '@cluster' AND NOT pgtrickle._is_distributed(t.relid);
        UPDATE pgtrickle.pgt_stream_tables AS s
        SET view_relid = stream_table.view,
            reinit_reason = CASE WHEN s.frontier IS NOT NULL THEN
                                 'a table that it reads was distributed differently, or has '
                                 'shards on nodes that were not read' END
        WHERE s.pgt_id = stream_table.pgt_id;
        PERFORM pgtrickle._register_sources(stream_table.pgt_id);
        id := stream_table.pgt_id;
        FOR relation IN
            SELECT s.relation FROM pgtrickle._sources(stream_table.view) AS s
            WHERE pgtrickle._is_citus_source(s.relation)
              AND NOT (stream_table.through_coordinator AND pgtrickle._is_distributed(s.relation))
        LOOP
            RETURN NEXT;
        END LOOP;
    END LOOP;
END
$$;

-- Stops reading distributed tables from nodes if no stream table reads them. Returns the names of the nodes, where
-- capture has to end.
CREATE OR REPLACE FUNCTION pgtrickle._unused_nodes() RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM pgtrickle.pgt_sharded_tables AS t
    WHERE t.database_set = '@cluster'
      AND NOT EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.through = t.relid);
    RETURN QUERY SELECT d.name FROM pgtrickle.pgt_databases AS d WHERE d.citus_group IS NOT NULL ORDER BY 1;
END
$$;

-- What the service last saw of the nodes.
CREATE OR REPLACE FUNCTION pgtrickle._followed_nodes()
RETURNS TABLE (groupid integer, clear_at timestamptz, problem text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.citus_group,
           coalesce((SELECT min(b.since) FROM pgtrickle.pgt_behind AS b WHERE b.database = d.name), d.looked_at),
           d.problem FROM pgtrickle.pgt_databases AS d WHERE d.citus_group IS NOT NULL
$$;

-- Why the changes of a distributed table cannot be captured on its nodes, and what to do; NULL if they can.
CREATE OR REPLACE FUNCTION pgtrickle._node_capture_problem(relation oid) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN c.relispartition THEN ARRAY[
                    format('it is a partition of %s, and writes through that table do not fire its triggers',
                           (SELECT i.inhparent::regclass FROM pg_inherits AS i WHERE i.inhrelid = c.oid)),
                    'Read the partitioned table, with a condition.']
                ELSE
                    (SELECT
                     ARRAY[format('%s has columnar storage, which does not support triggers that see changed rows',
                                          CASE WHEN member = c.oid THEN 'it'
                                               ELSE format('its partition %s', member::regclass) END),
                                   'Use SELECT alter_table_set_access_method(…, ''heap'').']
                      FROM pgtrickle._partition_tree(c.oid) AS member JOIN pg_class AS m ON m.oid = member
                      JOIN pg_am AS a ON a.oid = m.relam
                      WHERE a.amname = 'columnar' ORDER BY m.relname LIMIT 1) END
    FROM pg_class AS c WHERE c.oid = relation
$$;
