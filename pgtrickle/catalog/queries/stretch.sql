-- A refresh that takes longer than its schedule would leave no time for anything else. The schedule is stretched only
-- as far as needed, and equally for all stream tables refreshed together, so that they stay together.
UPDATE pgtrickle.pgt_stream_tables
SET stretch = least(8, 1.1 * %(seconds)s / extract(epoch FROM every)),
    next_due = data_timestamp + least(8 * every, make_interval(secs => 1.1 * %(seconds)s))
WHERE pgt_id = ANY (%(ids)s) AND every < make_interval(secs => 1.1 * %(seconds)s);
