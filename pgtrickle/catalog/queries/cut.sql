-- The identity of the cut: node, snapshot and time.
SELECT (SELECT system_identifier FROM pg_control_system()) || '/'
       || (SELECT oid FROM pg_database WHERE datname = current_database()) AS node,
       pg_current_snapshot()::text AS snapshot,
       statement_timestamp() AS cut_time, -- before the snapshot: a change that it does not see is committed later
       -- Locks what is to be read. A buffer may be locked to be emptied at this moment, but only briefly.
       set_config('lock_timeout', %(lock_timeout)s, true),
       pg_is_in_recovery() AS in_recovery,
       pgtrickle._setting('merge_work_mem_mb') AS merge_mb,
       pgtrickle._setting('delta_work_mem_cap_mb') AS delta_cap_mb;
