-- A buffer becomes two tables that are written in turn; existing rows stay in the first.

DO $$
DECLARE
    tracking record;
BEGIN
    FOR tracking IN SELECT source_stable_name, buffer_relid FROM pgtrickle.pgt_change_tracking LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', tracking.buffer_relid);
        EXECUTE format('CREATE TABLE pgtrickle_changes.%I () INHERITS (%s) WITH (autovacuum_enabled = off)',
                       'spare_' || tracking.source_stable_name, tracking.buffer_relid);
        EXECUTE format('CREATE SEQUENCE pgtrickle_changes.%I OWNED BY %s.__pgt_xid',
                       'turn_' || tracking.source_stable_name, tracking.buffer_relid);
    END LOOP;
END
$$;
