-- The amount of data to read: bytes of tables with their partitions and children, and of the largest file.
SELECT coalesce(sum(pg_table_size(member)), 0)::bigint, coalesce(max(pg_relation_size(member)), 0)::bigint
FROM unnest(%(relations)s::oid[]) AS wanted
CROSS JOIN LATERAL pgtrickle._partition_tree(wanted::regclass) AS member;
