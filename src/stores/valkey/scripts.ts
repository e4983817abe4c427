import { PRELUDE } from './prelude.ts';

/** What a take was answered before; ARGV[5] is its fingerprint. */
const TAKE_REPLAY = `local before, reused = replayed(ARGV[5])
if reused then return answer('reused') end
if before then
  if string.sub(before, 1, 1) == 'm' then return answer('miss', before) end
  local claim = told(string.sub(before, 2))
  if claim then return answer('taken', claim) end
  return answer('gone')
end
`;

/** Tells the live entries of a key, and why the newest dead one is. */
const LOOKED = `local function looked(key, chains, list)
  local rows = {}
  for i, e in ipairs(list) do
    if chains == '1' and e.s == 'i' then rows[i] = view(e, 'c') else rows[i] = view(e) end
  end
  local why = dead('tk:' .. key)
  if not why and #rows == 0 and known_before(key) then why = {0, 8} end
  return answer('look', rows, why and {why[1], why[2]} or {})
end
`;

/** The steps of the store. ARGV up to 4 is the prelude's; what a script takes beyond is said at its top. */
const BODIES = {
  // fingerprint, key, tenant, owner, bytes, blocks, handle bytes, ttl, per key, name of that limit, total bytes,
  // tenant entries, tenant bytes, precondition ('' | absent | revision), its entry, its revision, view, handle, chain,
  // whether its conversation goes on
  put: `
local fp, key, tenant, owner = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local bytes, blocks, handle_bytes, ttl = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local per_key, total = tonumber(ARGV[13]), tonumber(ARGV[15])
sweep(32)
local before, reused = replayed(fp)
if reused then return answer('reused') end
if before then return answer('put', before) end
local list = live_of(key)
local leaving
if ARGV[18] == 'absent' and #list > 0 then return answer('exists', list[#list].id) end
if ARGV[18] == 'revision' then
  for _, e in ipairs(list) do if e.id == ARGV[19] then leaving = e end end
  if not leaving or leaving.s ~= 'i' or leaving.r ~= ARGV[20] then
    return answer('revision', leaving and leaving.r or '')
  end
end
local too_many = #list - (leaving and 1 or 0) + 1 - per_key
local idle = {}
for _, e in ipairs(list) do if e.s == 'i' and e ~= leaving then idle[#idle + 1] = e end end
if too_many > #idle then return answer('limit', ARGV[14], per_key) end
local function held() return tonumber(call('HGET', N, 'cb') or 0) + bytes > total end
while held() and sweep_one() do end
if held() then return answer('limit', 'total_bytes', total) end
local freed, freed_bytes = leaving and 1 or 0, leaving and leaving.b or 0
for i = 1, too_many do freed, freed_bytes = freed + 1, freed_bytes + idle[i].b end
local function over()
  local T = call('HMGET', P .. 'nt:' .. tenant, 'e', 'b')
  if tonumber(T[1] or 0) - freed + 1 > tonumber(ARGV[16]) then return 'tenant_entries' end
  if tonumber(T[2] or 0) - freed_bytes + bytes > tonumber(ARGV[17]) then return 'tenant_bytes' end
end
while over() and sweep_one() do end
local quota = over()
if quota then return answer('quota', quota, quota == 'tenant_entries' and ARGV[16] or ARGV[17]) end
local displaced = {}
local function displace(e)
  if e.t == tenant then displaced[#displaced + 1] = e.id end
  enqueue(e)
end
if leaving then displace(leaving) end
for i = 1, too_many do
  count(idle[i].t, 'ev', 1)
  displace(idle[i])
end
while tonumber(call('HGET', N, 'b') or 0) + bytes > total do
  if not sweep_one() then
    local first = call('ZRANGE', P .. 'zi', 0, 0)[1]
    local next = first and load(first)
    if not next then break end
    count(next.t, 'ev', 1)
    displace(next)
  end
end
local seq = call('HINCRBY', M, 'seq', 1)
local e = {k = key, q = seq, x = now + ttl, a = now, t = tenant, o = owner, b = bytes, p = blocks, n = handle_bytes}
if ARGV[24] == '1' then e.v = 1 end
local fixed = cmsgpack.pack(e)
e.id, e.s, e.r, e.u = string.format('e-%s-%012x', run, seq), '', rev(), 0
local E = P .. 'e:' .. e.id
call('HSET', E, 'i', fixed, 'm', ARGV[21], 'h', ARGV[22])
if ARGV[23] ~= '' then call('HSET', E, 'c', ARGV[23]) end
call('PEXPIRE', E, ttl + INDEX_MS + 3600000)
zadd('a', seq, e.id)
zadd('k:' .. key, seq, e.id)
move(e, 'i')
call('HINCRBY', P .. 'oc', owner, 1)
call('HINCRBY', P .. 'op', owner, blocks)
for _, name in ipairs({'n', 'oc', 'op', 'oe'}) do call('PEXPIRE', P .. name, INDEX_MS) end
count(tenant, 'pu', 1)
tell(e, e.r, 0)
local value = table.concat({e.id, string.format('%.0f', e.r), string.format('%.0f', e.a), string.format('%.0f', e.x),
  table.concat(displaced, ',')}, '|')
remember(fp, value)
return answer('put', value)
`,
  // fingerprint, key, whether chains are wanted
  look: `
${LOOKED}sweep(32)
${TAKE_REPLAY}return looked(ARGV[6], ARGV[7], live_of(ARGV[6]))
`,
  // fingerprint, tenant, deadline, entry ('' for a miss), revision, matched tokens, reason, key if the entry was chosen
  // without a look (it must be the key's only one, else this is the look), whether chains are wanted, then mismatched
  // entries and their revisions
  claim: `
${LOOKED}sweep(32)
${TAKE_REPLAY}if ARGV[8] ~= '' then
  local e
  if ARGV[12] == '' then
    e = load(ARGV[8])
    if not e or not settle(e) or e.s ~= 'i' or e.r ~= ARGV[9] then return answer('lost') end
  else
    local list = live_of(ARGV[12])
    e = list[1]
    if #list ~= 1 or e.id ~= ARGV[8] or e.s ~= 'i' or e.r ~= ARGV[9] then return looked(ARGV[12], ARGV[13], list) end
  end
  local id = claim(e, 'c', tonumber(ARGV[7]), ARGV[10])
  count(ARGV[6], 'ta', 1)
  remember(ARGV[5], 't' .. id)
  return answer('given', id, e.deadline, string.format('%.0f', e.r), call('HGET', P .. 'e:' .. e.id, 'h'))
end
for i = 14, #ARGV, 2 do
  local e = load(ARGV[i])
  if e and settle(e) and e.s == 'i' and e.r == ARGV[i + 1] then enqueue(e) end
end
count(ARGV[6], 'm' .. ARGV[11], 1)
local value = 'm' .. ARGV[11] .. '|' .. ARGV[10]
remember(ARGV[5], value)
return answer('miss', value)
`,
  // claim, commit | release | who
  finish: `
sweep(32)
local c = claim_of(ARGV[5])
if not c then return answer('none') end
if ARGV[6] == 'who' then return answer('who', c.t, c.f) end
if ARGV[6] == 'commit' then
  if c.s == 'r' then return answer('none') end
  if c.s == 'o' then commit(c.id, c.e) end
  return answer('done')
end
if c.s == 'c' or (c.s == 'd' and c.d <= now) then return answer('spent') end
if c.s == 'o' then
  end_claim(c.id, 'r')
  local e = c.e
  if e then
    unclaim(e)
    if c.f == '1' then enqueue(e)
    else
      e.r = rev()
      move(e, 'i')
      tell(e, e.r, 0)
    end
  end
end
local e = load(c.entry)
if not e or not settle(e) or e.claim then return answer('done') end
return answer('done', view(e))
`,
  // fingerprint, owner, most, whether only what is queued, deadline, how young entries of conversations that go on are spared
  free: `
sweep(32)
local before, reused = replayed(ARGV[5])
if reused then return answer('reused') end
local claims = {}
if before then
  for id in string.gmatch(before, '[^,]+') do claims[#claims + 1] = told(id) end
  return answer('freed', claims)
end
local taken, most = {}, tonumber(ARGV[7])
local function oldest(z, state)
  local name = P .. z .. ':' .. ARGV[6]
  while true do
    local id = call('ZRANGE', name, 0, 0)[1]
    if not id then return nil end
    local e = load(id)
    if not e then call('ZREM', name, id)
    elseif settle(e) then
      if e.s == state then return e end
      -- Left by a process that knew no such list.
      call('ZREM', name, id)
    end
  end
end
local function next_one()
  local queued = oldest('oq', 'q')
  if queued or ARGV[8] == '1' then return queued end
  local idle, going_on = oldest('oi', 'i'), oldest('ol', 'i')
  if not idle or not going_on then return idle or going_on end
  if going_on.q < idle.q and now - going_on.a >= tonumber(ARGV[10]) then return going_on end
  return idle
end
while #taken < most do
  local e = next_one()
  if not e then break end
  claim(e, 'r', tonumber(ARGV[9]), 0)
  taken[#taken + 1] = e
end
table.sort(taken, function(a, b) return a.q < b.q end)
local ids = {}
for i, e in ipairs(taken) do
  ids[i] = e.claim
  claims[i] = told(e.claim)
end
remember(ARGV[5], table.concat(ids, ','))
return answer('freed', claims)
`,
  // fingerprint, entry, whether a tenant is asked for, that tenant, whether a revision is, that revision
  delete: `
sweep(32)
local before, reused = replayed(ARGV[5])
if reused then return answer('reused') end
if before then return answer('deleted', tonumber(before)) end
local e = load(ARGV[6])
if e and not (settle(e) and live(e.s) and (ARGV[7] == '' or e.t == ARGV[8])) then e = nil end
if e then
  if ARGV[9] == '1' and e.r ~= ARGV[10] then return answer('revision', e.r) end
  if e.claim then return answer('claimed') end
  enqueue(e)
end
remember(ARGV[5], e and '1' or '0')
return answer('deleted', e and 1 or 0)
`,
  // fingerprint, owner, behind which age, how many
  members: `
sweep(32)
local before, reused = replayed(ARGV[5])
if reused then return answer('reused') end
if before then return answer('dropped', before) end
local rows = {}
for _, z in ipairs({'oi:', 'ol:', 'oq:', 'ob:'}) do
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. z .. ARGV[6], '(' .. ARGV[7], '+inf', 'LIMIT', 0, ARGV[8])) do
    local e = load(id)
    if e then rows[#rows + 1] = e end
  end
end
table.sort(rows, function(a, b) return a.q < b.q end)
local page = {}
for i = 1, math.min(#rows, tonumber(ARGV[8])) do page[i] = view(rows[i]) end
return answer('members', page)
`,
  // then entries
  drop: `
local entries, claims = 0, 0
for i = 5, #ARGV do
  local e = load(ARGV[i])
  if e and settle(e) then
    if e.claim then
      claims = claims + 1
      end_claim(e.claim, 'd')
      unclaim(e)
    elseif e.s == 'i' then entries = entries + 1 end
    kill(e, OWNER_GONE)
  end
end
return answer('drop', entries, claims)
`,
  // fingerprint, answer
  record: `
local before, reused = replayed(ARGV[5])
if reused then return answer('reused') end
if not before then
  before = ARGV[6]
  remember(ARGV[5], before)
end
return answer('dropped', before)
`,
  // key
  key: `
${LOOKED}sweep(32)
return looked(ARGV[5], '0', live_of(ARGV[5]))
`,
  // entry, whether a tenant is asked for, that tenant
  entry: `
sweep(32)
local e = load(ARGV[5])
if e and settle(e) and live(e.s) and (ARGV[6] == '' or e.t == ARGV[7]) then return answer('look', {view(e)}, {}) end
local why = dead('te:' .. ARGV[5])
if why and (ARGV[6] == '' or why[3] == ARGV[7]) then return answer('look', {}, {why[1], why[2]}) end
local old = string.match(ARGV[5], '^e%-(%w+)%-')
if old and old ~= run and call('ZSCORE', base .. 'runs', old) then return answer('look', {}, {0, 8}) end
return answer('look', {}, {})
`,
  // behind which age, how many
  list: `
sweep(256)
local rows = {}
local ids = call('ZRANGEBYSCORE', P .. 'a', '(' .. ARGV[5], '+inf', 'LIMIT', 0, ARGV[6])
for _, id in ipairs(ids) do
  local e = load(id)
  if not e then call('ZREM', P .. 'a', id)
  else
    settle(e)
    rows[#rows + 1] = e.s ~= 'x' and view(e) or {id, '0', 0, 0, 0, 'x', e.q, 0, ''}
  end
end
return answer('list', string.format('%.0f', newest()), #ids, rows)
`,
  // tenant whose counts are asked for, or ''
  stats: `
sweep(512)
local rest = sweep_one() and 1 or 0
local counts = call('HGETALL', ARGV[5] == '' and N or P .. 'nt:' .. ARGV[6])
return answer('stats', counts, call('ZCARD', P .. 'd'), call('ZCARD', P .. 'zq'), call('HGETALL', P .. 'oc'),
  call('HGETALL', P .. 'op'), call('HGETALL', P .. 'oe'), rest)
`,
  // last change that was read ('' from now on), how many, last growth of a queue that was heard of, whether changes are wanted
  tail: `
sweep(256)
local revision = newest()
local queues, changes, gap = {}, {}, 0
for i, owner in ipairs(call('ZRANGEBYSCORE', P .. 'gq', '(' .. ARGV[7], '+inf', 'LIMIT', 0, 100)) do
  queues[i] = {owner, call('ZCARD', P .. 'oq:' .. owner), call('ZSCORE', P .. 'gq', owner)}
end
if ARGV[8] == '1' then
  local from = tonumber(call('GET', P .. 'wf'))
  if not from then
    call('UNLINK', P .. 'w')
    from = revision
  end
  call('SET', P .. 'wf', string.format('%.0f', from), 'PX', 30000)
  local read = tonumber(ARGV[5]) or revision
  local first = call('XRANGE', P .. 'w', '-', '+', 'COUNT', 1)[1]
  if first and call('XLEN', P .. 'w') >= 10000 and tonumber(string.match(first[1], '^%d+')) > read then gap = 1 end
  if read < from or read > revision then gap = 1 end
  if gap == 0 then changes = call('XRANGE', P .. 'w', string.format('(%.0f-0', read), '+', 'COUNT', ARGV[6]) end
end
return answer('tail', revision, gap, queues, changes)
`,
  // how many entries of an earlier run, that run
  clear: `
local Q = base .. ARGV[6] .. ':'
local left = 0
for _, z in ipairs({'zi', 'zq', 'zb'}) do
  for i, id in ipairs(call('ZPOPMIN', Q .. z, ARGV[5])) do
    if i % 2 == 1 then
      call('UNLINK', Q .. 'e:' .. id)
      left = left + 1
    end
  end
end
if left == 0 then
  for _, name in ipairs({'n', 'a', 'zr', 'd', 'oc', 'op', 'oe', 'w', 'wf', 'gq'}) do call('UNLINK', Q .. name) end
end
return answer('clear', left)
`,
} as const;

/** Name of a script. */
export type ScriptName = keyof typeof BODIES;

/**
 * Tells the run of the server, writes it down and tells the ones before, newest first. KEYS[2] is `{prefix}:runs`. It is
 * the one script that runs without knowing the run.
 */
const HELLO = `${PRELUDE.replace(
  "if ARGV[1] ~= run then return {'run', run} end",
  `
if call('ZSCORE', KEYS[2], run) == false then call('ZADD', KEYS[2], now, run) end
call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 90000000)
call('ZADD', KEYS[2], 'XX', now, run)
call('PEXPIRE', KEYS[2], 93600000)
do
  local runs = call('ZREVRANGE', KEYS[2], 0, 8)
  return {'hello', run, runs, string.match(info, 'redis_version:([%w.]+)') or '',
    string.match(info, 'valkey_version:([%w.]+)') or ''}
end
`,
)}`;

/** The whole text of a script; `hello` is the one that tells the run. Only a put is refused for want of memory. */
export function scriptText(name: ScriptName | 'hello'): string {
  const text = name === 'hello' ? HELLO : PRELUDE + BODIES[name];
  return `#!lua${name === 'put' ? '' : ' flags=allow-oom'}\n${text}`;
}
