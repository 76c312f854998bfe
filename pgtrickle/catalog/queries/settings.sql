-- The settings that the service uses, and values that are not allowed.
WITH known AS MATERIALIZED (SELECT * FROM pgtrickle._setting_sources())
SELECT (SELECT jsonb_object_agg(name, value) FROM (
            SELECT DISTINCT ON (name) name, value FROM known WHERE value IS NOT NULL
            ORDER BY name, rank) AS best) AS settings,
       (SELECT jsonb_object_agg(name || ' (' || origin || ')', raw || ': it takes ' || meaning) FROM known
        WHERE value IS NULL) AS wrong,
       (SELECT jsonb_object_agg(name || rank, raw) FROM known WHERE rank <= 4) AS attached,
       pgtrickle.is_paused() AS paused;
