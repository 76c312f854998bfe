-- Counts failures of all kinds, and reports them once.

ALTER TABLE pgtrickle.pgt_stream_tables
    ADD COLUMN counted_errors integer NOT NULL DEFAULT 0,
    ADD COLUMN error_kind text,
    ADD COLUMN failed_at timestamptz,
    ADD COLUMN alerted text;
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.consecutive_errors IS 'Refreshes that failed '
                                                                    'since the last one that did not.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.counted_errors IS 'Those of them that do not '
                                                                'pass by themselves: max_consecutive_errors '
                                                                'of them suspend it.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.error_kind IS 'What kind of failure the last '
                                                            'refresh ended with; NULL if it did not fail.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.alerted IS 'What the last event said: a kind '
                                                         'of failure, or SUSPENDED; NULL if all is well.';
UPDATE pgtrickle.pgt_stream_tables SET counted_errors = consecutive_errors WHERE consecutive_errors > 0;

ALTER TABLE pgtrickle.pgt_refresh_history ADD COLUMN kind text;
COMMENT ON COLUMN pgtrickle.pgt_refresh_history.kind IS 'What kind of failure it was; see '
                                                        'pgtrickle.diagnose_errors().';

DROP FUNCTION IF EXISTS pgtrickle._error_kind(text, text);
DROP FUNCTION IF EXISTS pgtrickle._error_remedy(text, text);
