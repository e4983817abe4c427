import { describe, expect, test } from 'vitest';
import type { RawFlags } from '../../src/config/flag-layers.ts';
import { loadConfig } from '../../src/config/load-config.ts';
import { formatProblem } from '../../src/config/problem.ts';

const KNOWN = { policies: ['round_robin'], connectors: ['nixl'], stores: ['memory', 'valkey'] };
const FILE = 'instances:\n  - {url: "http://f:1", role: prefill}\n  - {url: "http://f:2", role: decode}\n';

function load(flags: RawFlags, env: Record<string, string> = {}, fileText = '') {
  return loadConfig({ flags, env, fileText, known: KNOWN, terminal: false });
}

/** The prefill and the decode URLs, or the problems. */
function urls(flags: RawFlags, env?: Record<string, string>, fileText?: string): unknown {
  const loaded = load(flags, env, fileText);
  if (loaded.kind === 'error') return loaded.problems.map(formatProblem);
  const of = (role: string) =>
    loaded.config.instances
      .filter((each) => each.role === role)
      .map(({ url }) => url.replace('http://', ''))
      .join(' ');
  return { p: of('prefill'), d: of('decode') };
}

function warnings(flags: RawFlags, env?: Record<string, string>, fileText?: string): readonly string[] {
  const loaded = load(flags, env, fileText);
  return loaded.kind === 'ok' ? loaded.warnings.map(formatProblem) : [];
}

describe('--prefill and --decode', () => {
  test('occurrences and comma lists add up', () => {
    const flags = { prefill: ['http://a:1', 'http://b:1,http://c:1'], decode: ['http://d:1'] };
    expect(urls(flags)).toEqual({ p: 'a:1 b:1 c:1', d: 'd:1' });
    expect(warnings(flags)).toEqual([]);
  });

  test('one pool alone is no reason to guess the other', () => {
    expect(urls({ decode: ['http://d:1'] })).toEqual({ p: '', d: 'd:1' });
    expect(warnings({ decode: ['http://d:1'] })).toEqual([
      'no prefill engine is configured (--prefill URL); requests for it wait in the queue and then fail',
    ]);
  });

  test('"none" of the peers\' routers is no engine', () => {
    expect(urls({ prefill: ['http://a:1', 'none'], decode: ['http://d:1'] })).toEqual({ p: 'a:1', d: 'd:1' });
  });

  test('a bad or missing URL names the flag', () => {
    expect(urls({ prefill: ['a:1'], decode: ['http://d:1'] })).toEqual([
      '--prefill: "a:1" has no scheme; write "http://a:1"',
    ]);
    expect(urls({}, { BATON_PREFILL: 'a:1' })).toEqual(['BATON_PREFILL: "a:1" has no scheme; write "http://a:1"']);
    expect(urls({ prefill: [','] })).toEqual(['--prefill: expected a URL like "http://10.0.0.1:8100"']);
    expect(urls({ prefill: ['http://::1:8100'] })).toEqual([expect.stringContaining('needs brackets')]);
  });

  test('a URL that ends in /v1 is a likely slip', () => {
    expect(warnings({ prefill: ['http://a:1/v1'], decode: ['http://d:1'] })[0]).toMatch(
      /^--prefill: http:\/\/a:1\/v1 ends in \/v1/,
    );
  });

  test('variables take spaces and commas', () => {
    expect(urls({}, { BATON_PREFILL: 'http://a:1 http://b:1', BATON_DECODE: 'http://d:1,http://e:1' })).toEqual({
      p: 'a:1 b:1',
      d: 'd:1 e:1',
    });
    expect(urls({ prefill: ['http://x:1'] }, { BATON_PREFILL: 'http://a:1', BATON_DECODE: 'http://d:1' })).toEqual({
      p: 'x:1',
      d: 'd:1',
    });
  });
});

describe('the example proxy', () => {
  test('equal counts are paired by position', () => {
    const flags = {
      'prefiller-host': ['a', 'b'],
      'prefiller-port': ['1', '2'],
      'decoder-host': ['c'],
      'decoder-port': ['3'],
    };
    expect(urls(flags)).toEqual({ p: 'a:1 b:2', d: 'c:3' });
  });

  test.each([
    [
      { 'prefiller-host': ['a', 'b'], 'prefiller-port': ['1'] },
      '--prefiller-host and --prefiller-port: give as many ports as hosts, got 2 hosts and 1 port',
    ],
    [
      { 'prefiller-host': ['a', 'b'] },
      '--prefiller-host and --prefiller-port: give as many ports as hosts, got 2 hosts and 1 port',
    ],
    [
      { 'decoder-host': ['a'], 'decoder-port': ['1', '2'] },
      '--decoder-host and --decoder-port: give as many ports as hosts, got 1 host and 2 ports',
    ],
    [
      { 'decoder-port': ['1', '2'] },
      '--decoder-host and --decoder-port: give as many ports as hosts, got 1 host and 2 ports',
    ],
  ])('unequal counts are refused: %j', (flags: RawFlags, message) => {
    expect(urls(flags)).toEqual([message]);
  });

  test('what is not given has the default of the example', () => {
    expect(urls({ 'prefiller-host': ['a'] })).toEqual({ p: 'a:8100', d: 'localhost:8200' });
    expect(urls({ 'decoder-port': ['9'] })).toEqual({ p: 'localhost:8100', d: 'localhost:9' });
    expect(urls({ 'decoder-port': ['9'] }, {}, FILE)).toEqual({ p: 'f:1', d: 'localhost:9' });
    expect(urls({ 'decoder-port': ['9'] }, {}, 'instances: [{url: "http://f:3", role: both}]')).toEqual({
      p: '',
      d: 'localhost:9',
    });
  });

  test('hosts: IPv6 with or without brackets, no ports, no URLs', () => {
    expect(urls({ 'prefiller-host': ['::1', '[::2]'], 'prefiller-port': ['1', '2'] })).toEqual({
      p: '[::1]:1 [::2]:2',
      d: 'localhost:8200',
    });
    expect(urls({ 'prefiller-host': ['a:1'] })).toEqual([
      '--prefiller-host: expected a host without a port, got "a:1"',
    ]);
    expect(urls({ 'decoder-host': ['http://a'] })).toEqual([
      '--decoder-host: expected a host name or address, got "http://a"',
    ]);
    expect(urls({ 'prefiller-port': ['http'] })).toEqual([
      '--prefiller-port: expected a port from 1 to 65535, got "http"',
    ]);
  });

  test('host and port may come from different places', () => {
    expect(
      urls(
        { 'prefiller-host': ['a'] },
        { BATON_PREFILLER_PORT: '7', BATON_DECODER_HOSTS: 'x y', BATON_DECODER_PORTS: '1 2' },
      ),
    ).toEqual({
      p: 'a:7',
      d: 'x:1 y:2',
    });
  });
});

describe('the LMCache example', () => {
  test.each([
    [{ 'prefiller-host': ['a'], 'prefiller-port': ['7100'], 'num-prefillers': '3' }, 'a:7100 a:7101 a:7102'],
    [{ 'num-prefillers': '2' }, 'localhost:8100 localhost:8101'],
    [{ 'prefiller-host': ['a'], 'prefiller-port': ['1,2,3'] }, 'a:1 a:2 a:3'],
    [{ 'prefiller-host': ['a,b'], 'prefiller-port': ['1'] }, 'a:1 b:1'],
    [{ 'prefiller-host': ['a,b'] }, 'a:8100 b:8100'],
    [{ 'prefiller-host': ['a, b'], 'prefiller-port': ['1,2'] }, 'a:1 b:2'],
    [{ 'prefiller-host': ['a,', 'b'], 'prefiller-port': ['1,', '2'] }, 'a:1 b:2'],
  ])('%j', (flags: RawFlags, p) => {
    expect(urls(flags)).toEqual({ p, d: 'localhost:8200' });
  });

  test('other lengths are refused', () => {
    expect(urls({ 'prefiller-host': ['a,b,c'], 'prefiller-port': ['1,2'] })).toEqual([
      '--prefiller-host and --prefiller-port: give as many ports as hosts, got 3 hosts and 2 ports',
    ]);
    expect(urls({ 'prefiller-host': [','] })).toEqual([
      '--prefiller-host and --prefiller-port: expected at least one host and one port',
    ]);
  });

  test('the count is only for one host and one port', () => {
    const flags = { 'prefiller-host': ['a,b'], 'num-prefillers': '2' };
    expect(urls(flags)).toEqual({ p: 'a:8100 b:8100', d: 'localhost:8200' });
    expect(warnings(flags)).toEqual(['--num-prefillers: has no effect unless there is one host and one port']);
    expect(urls({ 'num-decoders': '0' })).toEqual(['--num-decoders: expected a whole number from 1 to 65535, got "0"']);
    expect(urls({ 'decoder-port': ['65535'], 'num-decoders': '2' })).toEqual([
      '--num-decoders: 2 ports from 65535 on go beyond 65535',
    ]);
  });
});

describe('an engine named twice', () => {
  test.each([
    [
      { prefill: ['http://a:1'], decode: ['http://A:1/'] },
      '--decode: http://a:1 is named twice, here and at --prefill; one server that does both has role both',
    ],
    [
      { prefill: ['http://a:1', 'http://a:1'], decode: ['http://d:1'] },
      '--prefill: http://a:1 is named twice, here and at --prefill; one server that does both has role both',
    ],
    [
      { prefill: ['http://a', 'http://a:80'], decode: ['http://d:1'] },
      expect.stringContaining('http://a is named twice'),
    ],
    [
      { prefill: ['http://a:80'], decode: ['https://a:80'] },
      '--decode: the instance id "a:80" is used twice, here and at --prefill; give one of them another name',
    ],
    [
      { 'prefiller-host': ['a', 'a'], 'prefiller-port': ['1', '1'] },
      expect.stringContaining('--prefiller-host: http://a:1 is named twice'),
    ],
    [
      { 'decoder-port': ['8100'] },
      '--decoder-port: http://localhost:8100 is named twice, here and at default prefill engine; one server that does both has role both',
    ],
  ])('%j', (flags: RawFlags, message) => {
    expect(urls(flags)).toEqual([message]);
  });

  test('a localhost by another name is another one', () => {
    expect(urls({ prefill: ['http://localhost:1'], decode: ['http://127.0.0.1:1'] })).toEqual({
      p: 'localhost:1',
      d: '127.0.0.1:1',
    });
  });

  test('in a file both lines are named, and names are unique', () => {
    const twice = 'instances:\n  - {url: "http://a:1", role: prefill}\n  - {url: "http://a:1", role: decode}\n';
    expect(urls({}, {}, twice)).toEqual([
      expect.stringMatching(/^baton\.yaml:3:5: http:\/\/a:1 is named twice, here and at baton\.yaml:2:5;/),
    ]);
    const names =
      'instances:\n  - {url: "http://a:1", role: prefill, name: x}\n  - {url: "http://a:2", role: decode, name: x}\n';
    expect(urls({}, {}, names)).toEqual([expect.stringContaining('the instance id "x" is used twice')]);
    expect(urls({}, {}, 'instances: [{url: "http://a:1", role: both, name: "a b"}]')).toEqual([
      expect.stringContaining('expected a name'),
    ]);
  });
});

describe('the two ways do not mix', () => {
  test('in one pool and one place', () => {
    expect(urls({ prefill: ['http://a:1'], 'prefiller-host': ['b'] })).toEqual([
      '--prefill: cannot be combined with --prefiller-host; give the prefill engines in one of the two ways',
    ]);
  });

  test('each pool may have its own', () => {
    expect(urls({ prefill: ['http://a:1'], 'decoder-host': ['b'] })).toEqual({ p: 'a:1', d: 'b:8200' });
  });

  test('flags win over variables', () => {
    expect(urls({ prefill: ['http://a:1'] }, { BATON_PREFILLER_HOST: 'b', BATON_DECODE: 'http://d:1' })).toEqual({
      p: 'a:1',
      d: 'd:1',
    });
    expect(urls({ 'prefiller-host': ['b'] }, { BATON_PREFILL: 'http://a:1', BATON_DECODE: 'http://d:1' })).toEqual({
      p: 'b:8100',
      d: 'd:1',
    });
  });
});

describe('--sim', () => {
  function sim(flags: RawFlags, env?: Record<string, string>, fileText?: string): unknown {
    const loaded = load(flags, env, fileText);
    return loaded.kind === 'ok'
      ? [loaded.config.sim, loaded.config.instances.length]
      : loaded.problems.map(formatProblem);
  }

  test('starts simulated engines in place of any others', () => {
    expect(sim({ sim: 'true' })).toEqual([{ prefill: 2, decode: 2 }, 0]);
    expect(sim({ sim: 'true', 'sim-prefill': '1', 'sim-decode': '3' })).toEqual([{ prefill: 1, decode: 3 }, 0]);
    expect(sim({}, { BATON_SIM: '1' })).toEqual([{ prefill: 2, decode: 2 }, 0]);
    expect(sim({}, { BATON_SIM: '0' })).toEqual([undefined, 2]);
  });

  test('is not combined with engines', () => {
    expect(sim({ sim: 'true', prefill: ['http://a:1'] })).toEqual([
      '--sim: starts simulated engines and cannot be combined with --prefill',
    ]);
    expect(sim({ sim: 'true', 'num-decoders': '1' })).toEqual([
      '--sim: starts simulated engines and cannot be combined with --num-decoders',
    ]);
    expect(sim({}, { BATON_SIM: '1', BATON_DECODER_HOST: 'x' })).toEqual([
      'BATON_SIM: starts simulated engines and cannot be combined with BATON_DECODER_HOST',
    ]);
  });

  test('the nearer source wins, and says so', () => {
    expect(sim({ sim: 'true' }, { BATON_PREFILL: 'http://a:1' })).toEqual([{ prefill: 2, decode: 2 }, 0]);
    expect(warnings({ sim: 'true' }, { BATON_PREFILL: 'http://a:1' })).toEqual([
      'BATON_PREFILL: ignored, because --sim starts simulated engines',
    ]);
    expect(sim({ prefill: ['http://a:1'], decode: ['http://d:1'] }, { BATON_SIM: '1' })).toEqual([undefined, 2]);
    expect(warnings({ prefill: ['http://a:1'], decode: ['http://d:1'] }, { BATON_SIM: '1' })).toEqual([
      'BATON_SIM: ignored, because --prefill names real engines',
    ]);
    expect(sim({ sim: 'true' }, {}, FILE)).toEqual([{ prefill: 2, decode: 2 }, 0]);
    expect(warnings({ sim: 'true' }, {}, FILE)).toEqual([
      '--sim: simulated engines take the place of the instances in the file',
    ]);
  });

  test('mistakes name the flag', () => {
    expect(sim({ 'sim-prefill': '2' })).toEqual(['--sim-prefill: is only for --sim']);
    expect(sim({ sim: 'true', 'sim-decode': 'x' })).toEqual([
      '--sim-decode: expected a whole number from 0 to 64, got "x"',
    ]);
    expect(sim({}, { BATON_SIM: 'maybe' })).toEqual(['BATON_SIM: expected true or false, got "maybe"']);
    expect(sim({ sim: 'true', roles: 'facade', 'router-url': 'http://r:1' })).toEqual([
      '--roles: simulated engines (--sim) need the registry in this process',
    ]);
  });
});
