/**
 * What every script begins with: the run and the time of the server, and the lives of entries and claims as
 * memory/life.ts has them. A script is one step for all store processes.
 *
 * KEYS[1] is `{prefix}:m`; with it all names share one hash tag. ARGV[1] is the run the caller believes in, ARGV[2] the
 * time (empty: the server's own), ARGV[3] and ARGV[4] the bounds of the release queue.
 *
 * M holds the clock, the generation and the last ids in one key: where ids begin anew, so does the generation, and no id
 * comes twice in a run.
 *
 * Names below `{prefix}:<run>:`
 *   n      counts, last revision                   nt:T  the same of tenant T
 *   e:ID   entry: i fixed facts, m view, h handle, c chain, s state, r revision, l claim and its deadline, u last claim
 *   k:KEY  live entries of a key, by age           a     all entries, by age
 *   zi zq zb   idle, queued, busy entries by expiry    oi:O oq:O ob:O   the same of owner O, by age
 *   ol:O   what oi:O leaves out: idle entries whose conversations go on
 *   oc op oe   by owner: entries, pinned blocks, live entries
 *   c:ID   claim                                   d     open claims, by deadline
 *   te:ID tk:KEY   why an entry, the newest of a key, is dead
 *   r:…    answers by idempotency key              zr    dead entries kept for these
 *   w wf   stream of changes, and since which revision it is whole     gq  owners whose queue grew, by revision
 * States: i idle, c claimed, q queued, r claimed for release, x dead.
 */
export const PRELUDE = `
local M = KEYS[1]
local base = string.sub(M, 1, -2)
local call = redis.call
local info = call('INFO', 'server', 'replication')
if string.find(info, 'role:slave', 1, true) then return redis.error_reply('READONLY this server is a replica') end
local clock = call('HMGET', M, 't', 'g', 'o')
local last = tonumber(clock[1]) or 0
local gen = clock[2] or '0'
local origin = tonumber(clock[3]) or 0
local now = tonumber(ARGV[2])
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
if not clock[1] then
  -- New, or lost with whatever else the server lost: nothing of before may pass for what comes.
  local born = call('TIME')
  gen = born[1] .. '.' .. born[2]
  call('HSET', M, 't', now, 'g', gen, 'o', origin)
  call('PEXPIRE', M, 360000000)
elseif now < last - 2000 then
  gen = string.format('%.0f-%.0f', last, now)
  origin = last
  call('HSET', M, 't', now, 'g', gen, 'o', origin)
elseif now < last then
  now = last
elseif now - last >= 100 then
  call('HSET', M, 't', now)
  call('PEXPIRE', M, 360000000)
end
local run = string.sub(
  redis.sha1hex(string.match(info, 'run_id:(%w+)') .. string.match(info, 'master_replid:(%w+)') .. gen), 1, 20)
if ARGV[1] ~= run then return {'run', run} end
local P = base .. run .. ':'
local N = P .. 'n'
local INDEX_MS = 93600000
local REPLAY_MS = 600000
local EXPIRED, TAKEN, RELEASED, OWNER_GONE = 2, 3, 4, 6
local grown, grew = {}, {}
local watched

-- Revisions of a run begin behind all of the runs before it, so that one who watches can tell old from new.
local function rev()
  local revision = call('HINCRBY', N, 'rev', 1)
  if revision > 1 then return revision end
  revision = 1000 * math.max(now, origin) + 1
  call('HSET', N, 'rev', revision)
  call('PEXPIRE', N, INDEX_MS)
  return revision
end

local function newest() return tonumber(call('HGET', N, 'rev')) or rev() end

local function count(tenant, field, by)
  call('HINCRBY', N, field, by)
  local T = P .. 'nt:' .. tenant
  call('HINCRBY', T, field, by)
  call('PEXPIRE', T, INDEX_MS)
end

local function zadd(name, score, member)
  call('ZADD', P .. name, score, member)
  call('PEXPIRE', P .. name, INDEX_MS)
end

local function live(s) return s == 'i' or s == 'c' end

local function tell(e, revision, reason)
  if watched == nil then watched = call('EXISTS', P .. 'wf') == 1 end
  if not watched then return end
  call('XADD', P .. 'w', 'MAXLEN', '~', 10000, string.format('%.0f-0', revision), 'i', e.id, 'y', reason,
    'c', e.s == 'c' and 1 or 0, 'a', e.a, 'x', e.x, 'm', call('HGET', P .. 'e:' .. e.id, 'm'))
  call('PEXPIRE', P .. 'w', INDEX_MS)
end

local function load(id)
  local v = call('HMGET', P .. 'e:' .. id, 'i', 's', 'r', 'l', 'u')
  if not v[1] or v[2] == 'x' then return nil end
  local e = cmsgpack.unpack(v[1])
  e.id, e.s, e.r, e.u = id, v[2], v[3], tonumber(v[5]) or 0
  if v[4] and v[4] ~= '' then
    local deadline, claim = string.match(v[4], '^(%d+)|(.*)$')
    e.claim, e.deadline = claim, tonumber(deadline)
  end
  return e
end

-- How long the dead are remembered: shorter while many die, so that memory has a bound.
local function memory_ms(long, short)
  local window = math.floor(now / REPLAY_MS)
  local field = call('HMGET', N, 'tw', 'tc')
  if tonumber(field[1]) ~= window then
    call('HSET', N, 'tw', window, 'tc', 1)
    return long
  end
  call('HINCRBY', N, 'tc', 1)
  return tonumber(field[2]) < 32768 and long or short
end

local function by_age(e, z) return 'o' .. (z == 'i' and e.v and 'l' or z) .. ':' .. e.o end

local function move(e, to)
  local from, id, E = e.s, e.id, P .. 'e:' .. e.id
  if from ~= '' then
    local z = (from == 'i' or from == 'q') and from or 'b'
    call('ZREM', P .. 'z' .. z, id)
    call('ZREM', P .. by_age(e, z), id)
  end
  if to ~= 'x' then
    local z = (to == 'i' or to == 'q') and to or 'b'
    zadd('z' .. z, e.x, id)
    zadd(by_age(e, z), e.q, id)
  end
  if from == 'q' then call('HINCRBY', N, 'qb', -e.n) end
  if to == 'q' then call('HINCRBY', N, 'qb', e.n) end
  if from == 'c' then call('HINCRBY', N, 'cb', -e.b) end
  if to == 'c' then call('HINCRBY', N, 'cb', e.b) end
  if live(from) ~= live(to) then
    local sign = live(to) and 1 or -1
    count(e.t, 'e', sign)
    count(e.t, 'b', sign * e.b)
    call('HINCRBY', P .. 'oe', e.o, sign)
    if sign < 0 then
      call('ZREM', P .. 'k:' .. e.k, id)
      call('HDEL', E, 'c')
    end
  end
  e.s = to
  if to ~= 'x' then
    call('HSET', E, 's', to, 'r', e.r)
    return
  end
  call('ZREM', P .. 'a', id)
  call('HINCRBY', P .. 'op', e.o, -e.p)
  if call('HINCRBY', P .. 'oc', e.o, -1) <= 0 then
    call('HDEL', P .. 'oc', e.o)
    call('HDEL', P .. 'op', e.o)
    call('HDEL', P .. 'oe', e.o)
  end
  local left = e.u + REPLAY_MS - now
  if e.u == 0 or left <= 0 then
    call('UNLINK', E)
    return
  end
  -- A replayed take tells the handle again.
  call('HSET', E, 's', 'x')
  call('PEXPIRE', E, left)
  zadd('zr', now + left, id .. '|' .. e.n)
  local kept = call('HINCRBY', N, 'rb', e.n)
  while kept > 134217728 do
    local first = call('ZPOPMIN', P .. 'zr')[1]
    if not first then break end
    local old, bytes = string.match(first, '^(.*)|(%d+)$')
    call('UNLINK', P .. 'e:' .. old)
    kept = call('HINCRBY', N, 'rb', -bytes)
  end
end

local function bury(e, reason, revision)
  if reason == EXPIRED and not e.claim then count(e.t, 'ex', 1) end
  local ms = memory_ms(3600000, 60000)
  local value = string.format('%.0f|%.0f|%d|', now + ms, e.q, reason)
  call('SET', P .. 'te:' .. e.id, value .. e.t, 'PX', ms)
  local before = call('GET', P .. 'tk:' .. e.k)
  local seq = before and tonumber(string.match(before, '^%d+|(%d+)|'))
  if not seq or seq <= e.q then call('SET', P .. 'tk:' .. e.k, value, 'PX', ms) end
  tell(e, revision, reason)
end

-- Sequence and reason of a tombstone, or nothing.
local function dead(name)
  local value = call('GET', P .. name)
  if not value then return nil end
  local till, seq, reason, tenant = string.match(value, '^(%d+)|(%d+)|(%d+)|(.*)$')
  if tonumber(till) <= now then return nil end
  return {tonumber(seq), tonumber(reason), tenant}
end

local function kill(e, reason)
  local revision = rev()
  if live(e.s) then bury(e, reason, revision) end
  e.claim = nil
  move(e, 'x')
end

local function end_claim(id, state)
  local C = P .. 'c:' .. id
  call('HSET', C, 's', state)
  call('PEXPIRE', C, memory_ms(3600000, REPLAY_MS))
  call('ZREM', P .. 'd', id)
end

local function unclaim(e)
  e.claim = nil
  call('HSET', P .. 'e:' .. e.id, 'l', '')
end

local function commit(id, e)
  end_claim(id, 'c')
  if e then
    unclaim(e)
    kill(e, TAKEN)
  end
end

local function settle(e)
  if e.claim and e.deadline <= now and e.deadline <= e.x then commit(e.claim, e)
  elseif e.x <= now then kill(e, EXPIRED) end
  return e.s ~= 'x'
end

local function enqueue(e)
  e.r = rev()
  if live(e.s) then bury(e, RELEASED, e.r) end
  move(e, 'q')
  if not grew[e.o] then
    grew[e.o] = true
    grown[#grown + 1] = e.o
  end
  zadd('gq', e.r, e.o)
  while call('ZCARD', P .. 'zq') > tonumber(ARGV[3]) or tonumber(call('HGET', N, 'qb')) > tonumber(ARGV[4]) do
    local first = call('ZRANGE', P .. 'zq', 0, 0)[1]
    local next = first and load(first)
    if not next then break end
    kill(next, RELEASED)
  end
end

-- The claim with the entry it holds, after what time has made of both.
local function claim_of(id)
  local v = call('HMGET', P .. 'c:' .. id, 's', 'e', 't', 'f', 'd')
  if not v[1] then return nil end
  local c = {id = id, s = v[1], entry = v[2], t = v[3], f = v[4], d = tonumber(v[5])}
  if c.s == 'o' then
    local e = load(c.entry)
    if e and e.claim == id then
      settle(e)
      if e.claim == id then c.e = e end
      c.s = call('HGET', P .. 'c:' .. id, 's')
    end
    if c.s == 'o' and c.d <= now then
      commit(id, c.e)
      c.e, c.s = nil, 'c'
    end
  end
  return c
end

local function claim(e, to, deadline_ms, matched)
  local revision = rev()
  e.r = revision
  if to == 'r' and live(e.s) then bury(e, RELEASED, revision) end
  local id = string.format('c-%s-%x', run, call('HINCRBY', M, 'cl', 1))
  local deadline = now + deadline_ms
  call('HSET', P .. 'c:' .. id, 's', 'o', 'e', e.id, 't', e.t, 'f', to == 'r' and 1 or 0, 'd', deadline,
    'r', revision, 'm', matched)
  call('PEXPIRE', P .. 'c:' .. id, deadline_ms + 7200000)
  zadd('d', deadline, id)
  call('HSET', P .. 'e:' .. e.id, 'l', string.format('%.0f|%s', deadline, id), 'u', now)
  e.claim, e.deadline, e.u = id, deadline, now
  move(e, to)
  if to == 'c' then tell(e, revision, 0) end
  return id
end

local function sweep_one()
  local id = call('ZRANGEBYSCORE', P .. 'd', '-inf', now, 'LIMIT', 0, 1)[1]
  if id then
    claim_of(id)
    call('ZREM', P .. 'd', id)
    return true
  end
  for _, z in ipairs({'zi', 'zq', 'zb'}) do
    local due = call('ZRANGEBYSCORE', P .. z, '-inf', now, 'LIMIT', 0, 1)[1]
    if due then
      local e = load(due)
      if e then settle(e) else call('ZREM', P .. z, due) end
      return true
    end
  end
  return false
end

local function sweep(most)
  for _ = 1, most do if not sweep_one() then break end end
  for _, member in ipairs(call('ZRANGEBYSCORE', P .. 'zr', '-inf', now, 'LIMIT', 0, most)) do
    call('ZREM', P .. 'zr', member)
    call('HINCRBY', N, 'rb', -string.match(member, '|(%d+)$'))
  end
end

-- Live entries of a key, oldest first.
local function live_of(key)
  local list = {}
  for _, id in ipairs(call('ZRANGE', P .. 'k:' .. key, 0, -1)) do
    local e = load(id)
    if not e then call('ZREM', P .. 'k:' .. key, id)
    elseif settle(e) and live(e.s) then list[#list + 1] = e end
  end
  return list
end

local function view(e, ...)
  local v = call('HMGET', P .. 'e:' .. e.id, 'm', ...)
  local row = {e.id, string.format('%.0f', tonumber(e.r)), e.a, e.x, e.claim and 1 or 0, e.s, e.q, e.b}
  for i = 1, 1 + select('#', ...) do row[8 + i] = v[i] or '' end
  return row
end

-- A claim as a replay tells it, also after its entry is gone.
local function told(id)
  local c = call('HMGET', P .. 'c:' .. id, 's', 'e', 'd', 'r', 'm')
  if not c[1] or c[1] == 'r' then return nil end
  local v = call('HMGET', P .. 'e:' .. c[2], 'i', 'm', 'h')
  if not v[1] then return nil end
  local e = cmsgpack.unpack(v[1])
  return {id, tonumber(c[3]), tonumber(c[5]), {c[2], c[4], e.a, e.x, 1, 'c', e.q, e.b, v[2], v[3]}}
end

-- The answer this call got before; 'reused' if another request had its key.
local function replayed(fingerprint)
  local value = call('HMGET', KEYS[2], 'f', 'v', 't')
  if not value[1] or tonumber(value[3]) <= now then return nil end
  if value[1] ~= fingerprint then return nil, true end
  return value[2]
end

local function remember(fingerprint, value)
  call('HSET', KEYS[2], 'f', fingerprint, 'v', value, 't', now + REPLAY_MS)
  call('PEXPIRE', KEYS[2], REPLAY_MS)
end

-- Whether an earlier run of the store knew the key.
local function known_before(key)
  for _, old in ipairs(call('ZREVRANGE', base .. 'runs', 0, 8)) do
    if old ~= run and call('EXISTS', base .. old .. ':k:' .. key, base .. old .. ':tk:' .. key) > 0 then return true end
  end
  return false
end

local function answer(kind, ...)
  local queues = {}
  for i, owner in ipairs(grown) do queues[i] = {owner, call('ZCARD', P .. 'oq:' .. owner), call('ZSCORE', P .. 'gq', owner)} end
  return {kind, now, queues, ...}
end
`;
