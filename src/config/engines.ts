import type { SimConfig } from './config.ts';
import type { Layer } from './flag-layers.ts';
import { hostPortUrl } from './instance-url.ts';
import type { Problem } from './problem.ts';
import { bad, countParser, ok, type Parsed, parseBoolean, parsePort, type ValueParser } from './values.ts';

type Pool = 'prefill' | 'decode';

/** One engine that a flag, a variable or a default names. */
export interface NamedEngine {
  readonly role: Pool;
  readonly url: string;
  readonly where: string;
  /** True for an engine that nobody named. */
  readonly isDefault: boolean;
}

/** What flags and variables say about engines. */
export interface EngineChoice {
  /** Roles that are given here, so that the engines of these roles in the file do not count. */
  readonly replaces: readonly Pool[];
  readonly engines: readonly NamedEngine[];
  readonly sim?: SimConfig;
  readonly problems: readonly Problem[];
  readonly warnings: readonly Problem[];
}

interface PoolFlags {
  readonly role: Pool;
  readonly url: string;
  readonly host: string;
  readonly port: string;
  readonly count: string;
  readonly defaultPort: string;
}

const PREFILL: PoolFlags = {
  role: 'prefill',
  url: 'prefill',
  host: 'prefiller-host',
  port: 'prefiller-port',
  count: 'num-prefillers',
  defaultPort: '8100',
};
const DECODE: PoolFlags = {
  role: 'decode',
  url: 'decode',
  host: 'decoder-host',
  port: 'decoder-port',
  count: 'num-decoders',
  defaultPort: '8200',
};
const POOLS = [PREFILL, DECODE] as const;

/**
 * Works out the engines of the command line and the environment, by the rules of the two example proxies.
 * `fileRoles` are the roles that the file gives engines for; undefined when it has no `instances` at all.
 */
export function chooseEngines(flags: Layer, env: Layer, fileRoles: readonly string[] | undefined): EngineChoice {
  const problems: Problem[] = [];
  const warnings: Problem[] = [];
  const sim = chooseSim(flags, env, problems, warnings);
  if (sim !== undefined) {
    if (fileRoles !== undefined && fileRoles.length > 0) {
      warnings.push({ where: sim.where, message: 'simulated engines take the place of the instances in the file' });
    }
    return {
      replaces: ['prefill', 'decode'],
      engines: [],
      sim: sim.config,
      problems,
      warnings,
    };
  }
  const pools = POOLS.map((pool) => choosePool(pool, flags, env, problems, warnings));
  const anyExample = pools.some((pool) => pool.form === 'example');
  const nothing = pools.every((pool) => pool.form === 'none') && fileRoles === undefined;
  const engines = pools.flatMap((pool): readonly NamedEngine[] => {
    if (pool.form !== 'none') return pool.engines;
    const inFile = fileRoles?.some((role) => role === pool.flags.role || role === 'both') ?? false;
    return nothing || (anyExample && !inFile) ? [defaultEngine(pool.flags)] : [];
  });
  return {
    replaces: pools.filter((pool) => pool.form !== 'none').map((pool) => pool.flags.role),
    engines,
    problems,
    warnings,
  };
}

function defaultEngine(pool: PoolFlags): NamedEngine {
  return {
    role: pool.role,
    url: `http://localhost:${pool.defaultPort}`,
    where: `default ${pool.role} engine`,
    isDefault: true,
  };
}

interface PoolChoice {
  readonly flags: PoolFlags;
  readonly form: 'none' | 'url' | 'example';
  readonly engines: readonly NamedEngine[];
}

function choosePool(pool: PoolFlags, flags: Layer, env: Layer, problems: Problem[], warnings: Problem[]): PoolChoice {
  const none: PoolChoice = { flags: pool, form: 'none', engines: [] };
  for (const layer of [flags, env]) {
    const example = [pool.host, pool.port, pool.count].find((flag) => layer.values[flag] !== undefined);
    const urls = layer.values[pool.url];
    if (urls !== undefined && example !== undefined) {
      problems.push({
        where: layer.nameOf(pool.url),
        message: `cannot be combined with ${layer.nameOf(example)}; give the ${pool.role} engines in one of the two ways`,
      });
      return { ...none, form: 'url' };
    }
    if (urls !== undefined) {
      // The peers' routers take a bootstrap port or "none" after the URL.
      const words = listOf(urls)
        .flatMap(splitCommas)
        .filter((word) => word !== 'none');
      const engines = words.map(
        (url): NamedEngine => ({ role: pool.role, url, where: layer.nameOf(pool.url), isDefault: false }),
      );
      if (engines.length === 0)
        problems.push({ where: layer.nameOf(pool.url), message: 'expected a URL like "http://10.0.0.1:8100"' });
      return { ...none, form: 'url', engines };
    }
    if (example !== undefined) return pairHostsAndPorts(pool, flags, env, problems, warnings);
  }
  return none;
}

function pairHostsAndPorts(
  pool: PoolFlags,
  flags: Layer,
  env: Layer,
  problems: Problem[],
  warnings: Problem[],
): PoolChoice {
  const failed: PoolChoice = { flags: pool, form: 'example', engines: [] };
  const hosts = readList(pool.host, 'localhost', flags, env);
  const ports = readList(pool.port, pool.defaultPort, flags, env);
  const count = readOne(pool.count, '1', flags, env);
  const number = countParser(1, 65_535)(count.text);
  if (number.kind === 'bad') {
    problems.push({ where: count.where, message: number.message });
    return failed;
  }
  const read = readAll(ports, parsePort, problems);
  if (read === undefined) return failed;
  const pairs = pair(hosts.items, read, number.value, hosts.commas || ports.commas);
  if (pairs.kind === 'bad') {
    problems.push({ where: `${hosts.where} and ${ports.where}`, message: pairs.message });
    return failed;
  }
  const engines: NamedEngine[] = [];
  for (const [host, port] of pairs.value) {
    if (port > 65_535) {
      problems.push({ where: count.where, message: `${number.value} ports from ${read[0]} on go beyond 65535` });
      return failed;
    }
    const url = hostPortUrl(host, port);
    if (url.kind === 'bad') {
      problems.push({ where: hosts.where, message: url.message });
      return failed;
    }
    engines.push({ role: pool.role, url: url.value, where: hosts.given ? hosts.where : ports.where, isDefault: false });
  }
  const single = hosts.items.length === 1 && read.length === 1;
  if (number.value > 1 && !single)
    warnings.push({ where: count.where, message: 'has no effect unless there is one host and one port' });
  return { flags: pool, form: 'example', engines };
}

/** Pairs hosts with ports: by position, or (comma form) one with many; a single pair counts up. */
function pair(
  hosts: readonly string[],
  ports: readonly number[],
  count: number,
  commas: boolean,
): Parsed<readonly (readonly [string, number])[]> {
  const [host] = hosts;
  const [port] = ports;
  if (host === undefined || port === undefined) return bad('expected at least one host and one port');
  if (hosts.length === 1 && ports.length === 1)
    return ok(Array.from({ length: count }, (_, i) => [host, port + i] as const));
  if (hosts.length === ports.length) return ok(hosts.map((each, i) => [each, ports[i] ?? port] as const));
  if (commas && hosts.length === 1) return ok(ports.map((each) => [host, each] as const));
  if (commas && ports.length === 1) return ok(hosts.map((each) => [each, port] as const));
  return bad(`give as many ports as hosts, got ${plural(hosts.length, 'host')} and ${plural(ports.length, 'port')}`);
}

function plural(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? '' : 's'}`;
}

interface ListValue {
  readonly items: readonly string[];
  readonly commas: boolean;
  readonly where: string;
  readonly given: boolean;
}

function readList(flag: string, fallback: string, flags: Layer, env: Layer): ListValue {
  const layer = flags.values[flag] === undefined ? env : flags;
  const raw = layer.values[flag];
  // A default is named as the flag the user can add.
  if (raw === undefined) return { items: [fallback], commas: false, where: flags.nameOf(flag), given: false };
  const words = listOf(raw);
  return {
    items: words.flatMap(splitCommas),
    commas: words.some((word) => word.includes(',')),
    where: layer.nameOf(flag),
    given: true,
  };
}

function readOne(
  flag: string,
  fallback: string,
  flags: Layer,
  env: Layer,
): { readonly text: string; readonly where: string } {
  const layer = flags.values[flag] === undefined ? env : flags;
  const raw = layer.values[flag];
  return { text: raw === undefined ? fallback : listOf(raw).join(' '), where: layer.nameOf(flag) };
}

function readAll<T>(list: ListValue, parse: ValueParser<T>, problems: Problem[]): readonly T[] | undefined {
  const values: T[] = [];
  for (const item of list.items) {
    const parsed = parse(item);
    if (parsed.kind === 'bad') {
      problems.push({ where: list.where, message: parsed.message });
      return undefined;
    }
    values.push(parsed.value);
  }
  return values;
}

function listOf(raw: string | readonly string[]): readonly string[] {
  return typeof raw === 'string' ? [raw] : raw;
}

function splitCommas(word: string): readonly string[] {
  return word
    .split(',')
    .map((part) => part.trim())
    .filter((part) => part !== '');
}

function chooseSim(
  flags: Layer,
  env: Layer,
  problems: Problem[],
  warnings: Problem[],
): { readonly config: SimConfig; readonly where: string } | undefined {
  const layer = flags.values['sim'] === undefined ? env : flags;
  const on = parseBoolean(layer.values['sim'] ?? 'false');
  const where = layer.nameOf('sim');
  if (on.kind === 'bad') problems.push({ where, message: on.message });
  const wanted = on.kind === 'ok' && on.value;
  const counts = (['sim-prefill', 'sim-decode'] as const).map((flag) => {
    const value = readOne(flag, '2', flags, env);
    const parsed = countParser(0, 64)(value.text);
    if (parsed.kind === 'bad') problems.push({ where: value.where, message: parsed.message });
    else if (!wanted && flags.values[flag] !== undefined)
      problems.push({ where: value.where, message: `is only for ${flags.nameOf('sim')}` });
    return parsed.kind === 'ok' ? parsed.value : 0;
  });
  if (!wanted) return undefined;
  const [prefill = 0, decode = 0] = counts;
  const byFlag = engineFlag(flags);
  const byEnv = engineFlag(env);
  const clash = byFlag ?? byEnv;
  if (byFlag !== undefined && layer === env) {
    warnings.push({ where, message: `ignored, because ${byFlag} names real engines` });
    return undefined;
  }
  if (clash !== undefined && (byFlag !== undefined || layer === env)) {
    problems.push({ where, message: `starts simulated engines and cannot be combined with ${clash}` });
  } else if (byEnv !== undefined) {
    warnings.push({ where: byEnv, message: `ignored, because ${where} starts simulated engines` });
  }
  return { config: { prefill, decode }, where };
}

function engineFlag(layer: Layer): string | undefined {
  const flag = POOLS.flatMap((pool) => [pool.url, pool.host, pool.port, pool.count]).find(
    (name) => layer.values[name] !== undefined,
  );
  return flag === undefined ? undefined : layer.nameOf(flag);
}
