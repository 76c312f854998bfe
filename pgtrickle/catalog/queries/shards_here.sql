-- For tables of a node: its shards, a query for their rows, and how to tell which shard has a row. Also what the names
-- of the shards refer to, if that is older than the snapshot.
SELECT t, s.names, pgtrickle._local_rows_query(t::oid::regclass), pgtrickle._shard_hash_column(t::oid::regclass),
       s.lowest, s.highest, s.relids
FROM unnest(%(tables)s::bigint[]) AS t
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(h.shard), '{}') AS names, coalesce(array_agg(h.lower_hash), '{}') AS lowest,
           coalesce(array_agg(h.upper_hash), '{}') AS highest, coalesce(array_agg(a.attrelid::bigint), '{}') AS relids
    FROM pgtrickle._local_shards(t::oid::regclass) AS h
    LEFT JOIN pg_attribute a ON a.attrelid = to_regclass(h.shard) AND a.attname = 'ctid'
) AS s
