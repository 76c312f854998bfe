-- Distributed tables that have shards on the coordinator: as on every cluster of one node.

ALTER TABLE pgtrickle.pgt_sharded_tables ADD COLUMN here boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN pgtrickle.pgt_sharded_tables.here IS 'Of a distributed table: it is read on the coordinator too, which has shards of it or may get some.';
