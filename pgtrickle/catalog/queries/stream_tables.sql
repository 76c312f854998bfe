-- What a refresh needs to know of the stream tables that it refreshes.
SELECT s.pgt_id,
       s.pgt_schema,
       s.pgt_name,
       s.pgt_relid::oid::bigint AS relid,
       s.view_relid::oid::bigint AS view_relid,
       s.refresh_mode,
       s.effective_mode,
       s.mode_reason,
       s.status,
       s.status_reason,
       s.schedule,
       s.key_columns,
       s.frontier,
       s.data_timestamp,
       s.reinit_reason,
       s.fencing_token,
       s.consecutive_errors,
       s.full_seconds,
       s.row_seconds,
       CASE WHEN s.fuse_passes THEN 0
            ELSE coalesce(s.fuse_ceiling, pgtrickle._setting('fuse_default_ceiling')::bigint) END AS fuse_ceiling,
       -- What no single database can compute is computed on Spark; a database does not know which shards are its own
       -- either.
       CASE WHEN elsewhere.databases IS NOT NULL OR here.tables IS NOT NULL THEN 'spark'
            ELSE coalesce(s.placement, pgtrickle._setting('placement')) END AS placement,
       s.pooler_compatibility_mode,
       s.lost_members,
       s.st_placement,
       s.has_former_row_ids,
       s.output_distribution_column,
       coalesce(elsewhere.databases, '{}') AS databases,
       EXISTS (SELECT FROM pgtrickle.pgt_dependencies d
               WHERE d.pgt_id = s.pgt_id AND d.source_type <> 'OTHER_DATABASE' AND d.through IS NULL) AS reads_here,
       coalesce(here.tables, '{}') AS spread_here,
       pgtrickle._has_citus() AS on_citus,
       s.session_settings,
       s.defining_query,
       pg_get_userbyid(c.relowner) AS owner,
       c.relowner = quote_ident(current_user)::regrole AS own,
       coalesce(pgtrickle._ownership_problem(s.pgt_id), pgtrickle._privilege_problem(s.pgt_id)) AS problem,
       c.relowner <> quote_ident(current_user)::regrole
           AND NOT pgtrickle._are_owner_functions_current(s.pgt_id) AS outdated,
       pgtrickle._hidden_sources(s.view_relid) AS hidden
FROM pgtrickle.pgt_visible_stream_tables s
LEFT JOIN pg_class c ON c.oid = s.pgt_relid
CROSS JOIN LATERAL (
    SELECT array_agg(DISTINCT f.database) AS databases
    FROM pgtrickle.pgt_dependencies d JOIN pgtrickle.pgt_foreign_tables f ON f.relid = d.source_relid
    WHERE d.pgt_id = s.pgt_id
) AS elsewhere
CROSS JOIN LATERAL (
    SELECT array_agg(d.source_relid::oid::bigint) AS tables
    FROM pgtrickle.pgt_dependencies d WHERE d.pgt_id = s.pgt_id AND d.through = d.source_relid
) AS here
WHERE %(ids)s::bigint[] IS NULL OR s.pgt_id = ANY (%(ids)s)
ORDER BY s.pgt_id;
