-- For each stream table: a privilege that its owner lacks, and sources that only PostgreSQL may read for it.
SELECT s.pgt_id, pgtrickle._privilege_problem(s.pgt_id), pgtrickle._hidden_sources(s.view_relid)
FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = ANY (%s);
