-- The cut's identity: which node, which snapshot, when.
SELECT (SELECT system_identifier FROM pg_control_system()) || '/'
       || (SELECT oid FROM pg_database WHERE datname = current_database()) AS node,
       pg_current_snapshot()::text AS snapshot,
       statement_timestamp() AS cut_time, -- before the snapshot: what it does not see is committed later
       -- What is to be read is locked. A buffer may be emptied at this moment, which is over soon.
       set_config('lock_timeout', %(lock_timeout)s, true),
       pg_is_in_recovery() AS in_recovery,
       pgtrickle._setting('merge_work_mem_mb') AS merge_mb,
       pgtrickle._setting('delta_work_mem_cap_mb') AS delta_cap_mb;
