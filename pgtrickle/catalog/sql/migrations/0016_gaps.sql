-- A new kind of marker: triggers that were missing for a while.

ALTER TABLE pgtrickle_changes.pgt_markers DROP CONSTRAINT pgt_markers_kind_check;
ALTER TABLE pgtrickle_changes.pgt_markers ADD CONSTRAINT pgt_markers_kind_check
    CHECK (kind IN ('TRUNCATE', 'SCHEMA', 'OVERFLOW', 'MERGE', 'GAP'));
