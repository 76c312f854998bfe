-- Requests of orchestrators: a second request with the same key is the same request.
ALTER TABLE pgtrickle.pgt_requests ADD COLUMN request_key text;
COMMENT ON COLUMN pgtrickle.pgt_requests.request_key IS 'What its author calls it: the run '
                                                        'of a job that must not ask twice.';
CREATE UNIQUE INDEX ON pgtrickle.pgt_requests (pgt_id, requested_by, request_key) WHERE request_key IS NOT NULL;

DROP FUNCTION IF EXISTS pgtrickle.manual_refresh(text);
DROP PROCEDURE IF EXISTS pgtrickle.refresh_and_wait(text, interval);
DROP FUNCTION IF EXISTS pgtrickle._request(bigint);
DROP FUNCTION IF EXISTS pgtrickle._file_request(bigint);
