(SELECT {missing_columns}) AS lacking,
                LATERAL (SELECT pg_catalog.record_send(ROW({column_types})) AS types
                         FROM {transition_table} LIMIT 1) AS r
