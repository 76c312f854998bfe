-- Citus: whether it is installed, how it stores a source, and which of its rows are on this node.

CREATE OR REPLACE FUNCTION pgtrickle._has_citus() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')
$$;

-- The group of this node: 0 on a coordinator, and without Citus.
CREATE OR REPLACE FUNCTION pgtrickle._citus_group() RETURNS integer
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT pgtrickle._has_citus() THEN
        RETURN 0;
    END IF;
    RETURN (SELECT g.groupid FROM pg_dist_local_group AS g);
END
$$;

-- local, reference, distributed, single_shard, or citus_local: on the coordinator, and known to Citus.
CREATE OR REPLACE FUNCTION pgtrickle._citus_placement(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known record;
BEGIN
    IF NOT pgtrickle._has_citus() THEN
        RETURN 'local';
    END IF;
    SELECT p.partmethod, p.repmodel, p.colocationid INTO known FROM pg_dist_partition AS p
    WHERE p.logicalrelid = relation;
    RETURN CASE WHEN NOT FOUND THEN 'local'
                WHEN known.partmethod = 'n' AND known.repmodel = 't' THEN 'reference'
                WHEN known.partmethod = 'n' AND known.colocationid = 0 THEN 'citus_local'
                WHEN known.partmethod = 'n' THEN 'single_shard'
                ELSE 'distributed' END;
END
$$;

-- Whether the rows of a table are in one or many shards, on any nodes.
CREATE OR REPLACE FUNCTION pgtrickle._is_distributed(relation regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pgtrickle._citus_placement(relation) IN ('distributed', 'single_shard')
$$;

-- The column whose hash determines the shard of a row.
CREATE OR REPLACE FUNCTION pgtrickle._distribution_column(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT pgtrickle._has_citus() THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT column_to_column_name(p.logicalrelid, p.partkey) FROM pg_dist_partition AS p
            WHERE p.logicalrelid = relation AND p.partmethod = 'h');
END
$$;

-- Whether a table is captured like one that Citus manages or may manage at any time: any table of a database with
-- Citus, partitioned or not, except those with inheritance other than partitioning, which Citus does not distribute.
CREATE OR REPLACE FUNCTION pgtrickle._is_citus_source(relation regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pgtrickle._has_citus()
       AND (pgtrickle._citus_placement(relation) <> 'local'
            OR (SELECT c.relkind = 'p' OR c.relkind = 'r'
                  AND NOT EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhparent = relation)
                FROM pg_class AS c WHERE c.oid = relation)
               AND NOT EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = relation)
               AND NOT EXISTS (SELECT FROM pg_subscription_rel AS r
                               WHERE r.srrelid IN (SELECT pgtrickle._partition_tree(relation))))
$$;

-- Whether a table no longer exists under its name: it was dropped, Citus turned it into a shard (pg_class does not
-- show those), or it is a former shard waiting to be dropped.
CREATE OR REPLACE FUNCTION pgtrickle._is_gone(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = relation) THEN
        RETURN true;
    END IF;
    RETURN pgtrickle._has_citus()
        AND EXISTS (SELECT FROM pg_dist_cleanup AS c WHERE to_regclass(c.object_name) = relation);
END
$$;

-- The shards of a distributed table on this node, with the ranges of their hashes.
CREATE OR REPLACE FUNCTION pgtrickle._local_shards(relation regclass)
RETURNS TABLE (shardid bigint, shard text, lower_hash integer, upper_hash integer)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT s.shardid, shard_name(s.logicalrelid, s.shardid, false), s.shardminvalue::integer, s.shardmaxvalue::integer
    FROM pg_dist_shard AS s
    JOIN pg_dist_placement AS p USING (shardid)
    WHERE s.logicalrelid = relation AND p.groupid = (SELECT g.groupid FROM pg_dist_local_group AS g)
      AND p.shardstate = 1
    ORDER BY s.shardid;
END
$$;

-- The column whose hash identifies the shard of a row: of a type that all nodes hash alike. Labels of enums, and the
-- objects of regclass and similar types, have different OIDs on every node; equal strings that are not identical need
-- the column's own collation.
CREATE OR REPLACE FUNCTION pgtrickle._shard_hash_column(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT a.attname FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
    WHERE a.attrelid = relation AND a.attname = pgtrickle._distribution_column(relation)
      AND coalesce(c.collisdeterministic, true)
      AND t.typnamespace = 'pg_catalog'::regnamespace AND t.typtype = 'b' AND t.typcategory <> 'A'
      AND t.typname NOT LIKE 'reg%'
$$;

-- A query for the rows of a distributed table on this node. The table itself would return those of all nodes.
CREATE OR REPLACE FUNCTION pgtrickle._local_rows_query(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT string_agg('SELECT * FROM ' || h.shard, ' UNION ALL ' ORDER BY h.shardid)
                     FROM pgtrickle._local_shards(relation) AS h),
                    (SELECT format('SELECT (NULL::%I.%I).* WHERE false', n.nspname, c.relname)
                     FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation))
$$;

-- Nodes that have rows, or may have: all primaries of the cluster.
CREATE OR REPLACE FUNCTION pgtrickle._citus_nodes() RETURNS TABLE (groupid integer, host text, port integer)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pgtrickle._has_citus() THEN
        RETURN QUERY SELECT n.groupid, n.nodename, n.nodeport FROM pg_dist_node AS n
                     WHERE n.noderole = 'primary' AND n.isactive ORDER BY n.groupid;
    END IF;
END
$$;

-- The name of a node among the registered databases; a query cannot contain such a name.
CREATE OR REPLACE FUNCTION pgtrickle._node_name(groupid integer) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT '@node_' || groupid
$$;
