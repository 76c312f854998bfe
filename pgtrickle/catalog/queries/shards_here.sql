-- Of tables of a node: the shards that it has, a query for the rows of these, and how it is told which has a row. And
-- what the shards' names stand for, where that is older than the snapshot.
SELECT t, s.names, pgtrickle._local_rows_query(t::oid::regclass), pgtrickle._shard_hash_column(t::oid::regclass),
       s.lowest, s.highest, s.relids
FROM unnest(%(tables)s::bigint[]) AS t
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(h.shard), '{}') AS names, coalesce(array_agg(h.lower_hash), '{}') AS lowest,
           coalesce(array_agg(h.upper_hash), '{}') AS highest, coalesce(array_agg(a.attrelid::bigint), '{}') AS relids
    FROM pgtrickle._local_shards(t::oid::regclass) AS h
    LEFT JOIN pg_attribute a ON a.attrelid = to_regclass(h.shard) AND a.attname = 'ctid'
) AS s
