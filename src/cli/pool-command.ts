import { randomUUID } from 'node:crypto';
import { setTimeout } from 'node:timers/promises';
import { toJson } from '@bufbuild/protobuf';
import { type Client, Code, ConnectError } from '@connectrpc/connect';
import { type Instance, InstanceSchema, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import { type PoolRegistry, WatchInstancesResponseSchema } from '../../gen/baton/v1/pool_registry_pb.ts';
import { parsePeerUrl } from '../config/instance-url.ts';
import { readText } from '../config/load.ts';
import { parseSecret } from '../config/values.ts';
import { BatonError } from '../core/errors.ts';
import { roleWord, stateWord } from '../core/instance-words.ts';
import { holdsCertificate } from '../core/pem.ts';
import { connectRemote, type RemoteOptions } from '../rpc/clients.ts';
import { whyNoConnection } from '../rpc/connection-words.ts';
import { batonErrorFrom } from '../rpc/errors.ts';
import { FAILED, OK, USAGE } from './exit-codes.ts';
import type { PoolRequest } from './pool-parse.ts';

/** The process around `baton pool`. */
export interface PoolHost {
  readonly env: Readonly<Record<string, string | undefined>>;
  out(text: string): void;
  err(text: string): void;
  /** Resolves at the first request to stop. */
  stopRequested(): Promise<unknown>;
}

const DEFAULT_URL = 'http://127.0.0.1:50051';
const CALL_MS = 10_000;
const LOOK_MS = 250;
const RETRY_MS = 1000;
const PAGE = 1000;

const ROLES: Readonly<Record<string, Role>> = { prefill: Role.PREFILL, decode: Role.DECODE, both: Role.BOTH };
const STATES: Readonly<Record<string, InstanceState>> = {
  starting: InstanceState.STARTING,
  ready: InstanceState.READY,
  suspect: InstanceState.SUSPECT,
  draining: InstanceState.DRAINING,
  gone: InstanceState.GONE,
};

interface Call {
  readonly registry: Client<typeof PoolRegistry>;
  readonly request: PoolRequest;
  readonly host: PoolHost;
  readonly url: string;
}

const ACTIONS: Readonly<Record<PoolRequest['action'], (call: Call) => Promise<void>>> = {
  list,
  add,
  watch,
  drain: async (call) => {
    await each(call, async (instanceId) => {
      const { reason } = call.request;
      const { instance } = await call.registry.drainInstance(
        { instanceId, reason: reason ?? '' },
        { timeoutMs: CALL_MS },
      );
      return stateOf(instance);
    });
    if (call.request.wait) await untilGone(call);
  },
  resume: (call) =>
    each(call, async (instanceId) => {
      const { reason } = call.request;
      const { instance } = await call.registry.resumeInstance(
        { instanceId, reason: reason ?? '' },
        { timeoutMs: CALL_MS },
      );
      if (instance?.state === InstanceState.GONE) throw notResumed(instance);
      return stateOf(instance);
    }),
  remove: async (call) => {
    const missing: string[] = [];
    await each(call, async (instanceId) => {
      const { reason } = call.request;
      const { removed } = await call.registry.deregisterInstance(
        { instanceId, reason: reason ?? '' },
        { timeoutMs: CALL_MS },
      );
      if (!removed) missing.push(instanceId);
      return removed ? 'removed' : 'was not there';
    });
    // The others are removed all the same: what was wanted is so, unless the id is a slip.
    if (missing.length > 0)
      throw new BatonError({ reason: 'INSTANCE_NOT_FOUND', message: notKnown(missing.join(', ')) });
  },
};

/** Runs one command of `baton pool`; resolves with the exit code. */
export async function runPool(host: PoolHost, request: PoolRequest): Promise<number> {
  const options = readOptions(host, request);
  if (typeof options === 'string') {
    host.err(`baton: ${options}\n`);
    return USAGE;
  }
  using remote = connectRemote(options);
  try {
    await ACTIONS[request.action]({ registry: remote.poolRegistry, request, host, url: options.url });
    return OK;
  } catch (error) {
    host.err(`baton: ${sentence(error, options.url)}\n`);
    return FAILED;
  }
}

/** How the registry is reached, or what is wrong with the command line. */
function readOptions({ env }: PoolHost, request: PoolRequest): RemoteOptions | string {
  const url = parsePeerUrl(request.registryUrl ?? (env['BATON_REGISTRY_URL']?.trim() || DEFAULT_URL));
  if (url.kind === 'bad') return `--registry-url: ${url.message}`;
  const ca = request.ca === undefined ? undefined : readText(request.ca);
  if (ca?.kind === 'bad') return `--ca: ${ca.message}`;
  if (ca !== undefined && !holdsCertificate(ca.text)) return `--ca: ${request.ca} holds no certificate (PEM)`;
  const file = request.tokenFile === undefined ? undefined : readText(request.tokenFile);
  if (file?.kind === 'bad') return `--token-file: ${file.message}`;
  const written = file?.text ?? env['BATON_RPC_TOKEN'] ?? '';
  const token = written.trim() === '' ? undefined : parseSecret(written.trim());
  if (token?.kind === 'bad') return `${file === undefined ? 'BATON_RPC_TOKEN' : '--token-file'}: ${token.message}`;
  return {
    url: url.value.url,
    ...(token === undefined ? {} : { token: token.value }),
    ...(ca === undefined ? {} : { tls: { ca: ca.text } }),
  };
}

function sentence(error: unknown, url: string): string {
  const { code } = ConnectError.from(error);
  const { message, reason } = batonErrorFrom(error, 'INTERNAL');
  if (reason === 'CREDENTIAL_REQUIRED') return `${message} (--token-file, or BATON_RPC_TOKEN)`;
  if (reason !== 'INTERNAL') return message;
  const noConnection = whyNoConnection(error, { ca: '--ca', cert: 'baton pool shows none' });
  if (noConnection !== undefined) return `no registry answers at ${url} (--registry-url): ${noConnection}`;
  if (code === Code.Unavailable || code === Code.DeadlineExceeded) {
    return `no registry answers at ${url} (--registry-url); is it running, and is this its RPC port?`;
  }
  if (code === Code.Unimplemented) return `${url} serves no pool registry (--registry-url)`;
  return `the registry at ${url} failed: ${ConnectError.from(error).rawMessage}`;
}

async function list({ registry, request, host }: Call): Promise<void> {
  const all: Instance[] = [];
  const { role, state } = request;
  const states = state === undefined ? (request.all ? Object.values(STATES) : []) : [STATES[state] ?? 0];
  let pageToken = '';
  do {
    const filter = { role: role === undefined ? Role.UNSPECIFIED : (ROLES[role] ?? 0), states };
    const page = await registry.listInstances({ filter, pageSize: PAGE, pageToken }, { timeoutMs: CALL_MS });
    all.push(...page.instances);
    pageToken = page.nextPageToken;
  } while (pageToken !== '');
  if (request.json) host.out(`${JSON.stringify(all.map(instanceJson), undefined, 2)}\n`);
  else host.out(table(all, request.wide));
}

async function add({ registry, request, host }: Call): Promise<void> {
  const { words, role = '', id = '', connector = '', labels } = request;
  const { instance } = await registry.registerInstance(
    {
      idempotencyKey: randomUUID(),
      instance: { url: words[0] ?? '', role: ROLES[role] ?? Role.UNSPECIFIED, id, connector, labels: { ...labels } },
      untilRemoved: true,
    },
    { timeoutMs: CALL_MS },
  );
  tell({ request, host }, instance?.id ?? '', stateOf(instance));
}

/** Does one thing to each of the ids; the first that fails ends it. */
async function each(call: Call, act: (id: string) => Promise<string>): Promise<void> {
  for (const id of call.request.words) tell(call, id, await act(id).catch((error: unknown) => rethrow(error, id)));
}

/** The registry's own sentence does not say which of several ids it means. */
function rethrow(error: unknown, id: string): never {
  if (error instanceof BatonError || batonErrorFrom(error, 'INTERNAL').reason !== 'INSTANCE_NOT_FOUND') throw error;
  throw new BatonError({ reason: 'INSTANCE_NOT_FOUND', message: notKnown(id) }, { cause: error });
}

function notKnown(ids: string): string {
  return `the registry does not know ${ids}`;
}

async function untilGone({ registry, request, host }: Call): Promise<void> {
  const stop = new AbortController();
  void host.stopRequested().then(() => stop.abort());
  for (const instanceId of request.words) {
    while (!stop.signal.aborted && !(await isGone(registry, instanceId))) {
      await setTimeout(LOOK_MS, undefined, { signal: stop.signal }).catch(() => undefined);
    }
    if (stop.signal.aborted) throw new BatonError({ reason: 'CLIENT_GONE', message: 'interrupted' });
    tell({ request, host }, instanceId, 'gone');
  }
}

async function isGone(registry: Client<typeof PoolRegistry>, instanceId: string): Promise<boolean> {
  try {
    const { instance } = await registry.getInstance({ instanceId }, { timeoutMs: CALL_MS });
    return instance?.state === InstanceState.GONE;
  } catch (error) {
    if (batonErrorFrom(error, 'INTERNAL').reason === 'INSTANCE_NOT_FOUND') return true;
    throw error;
  }
}

async function watch({ registry, request, host, url }: Call): Promise<void> {
  const stop = new AbortController();
  void host.stopRequested().then(() => stop.abort());
  const { signal } = stop;
  let resumeToken = '';
  let isAway = false;
  while (!signal.aborted) {
    try {
      for await (const message of registry.watchInstances({ resumeToken }, { signal })) {
        if (message.resumeToken !== '') resumeToken = message.resumeToken;
        isAway = false;
        const { event } = message;
        if (request.json) host.out(`${JSON.stringify(toJson(WatchInstancesResponseSchema, message))}\n`);
        else if (event.case === 'upserted') host.out(`${line(cells(event.value), WIDTHS)}\n`);
        else if (event.case === 'removed') host.out(`${event.value.instanceId} left: ${event.value.reason}\n`);
        else if (event.case === 'reset') host.out(`everything anew: ${event.value.reason}\n`);
      }
    } catch (error) {
      if (signal.aborted) return;
      // A registry that was never reached, or that refuses, is the user's to mend; one that went comes back.
      if (ConnectError.from(error).code !== Code.Unavailable || (resumeToken === '' && !isAway)) throw error;
      if (!isAway) host.err(`baton: the registry at ${url} is away; waiting for it\n`);
      isAway = true;
      await setTimeout(RETRY_MS, undefined, { signal }).catch(() => undefined);
    }
  }
}

function tell({ request, host }: Pick<Call, 'request' | 'host'>, id: string, result: string): void {
  host.out(request.json ? `${JSON.stringify({ id, result })}\n` : `${id}: ${result}\n`);
}

function notResumed({ id, stateReason }: Instance): BatonError {
  const message = `${id} is gone (${stateReason}) and is not resumed: add it again, or let its source name it anew`;
  return new BatonError({ reason: 'INSTANCE_NOT_FOUND', message, metadata: { instance_id: id } });
}

function stateOf(instance: Instance | undefined): string {
  return instance === undefined ? 'unknown' : stateWord(instance.state);
}

function instanceJson(instance: Instance) {
  return toJson(InstanceSchema, instance, { alwaysEmitImplicit: true });
}

const HEAD = ['ID', 'ROLE', 'STATE', 'REASON', 'LOAD', 'KV', 'PINS', 'GEN', 'MODELS', 'URL'];
/** Of the lines of a watch, which come one by one. */
const WIDTHS = [24, 7, 8, 22, 4, 4, 4, 3, 12];

function cells({ id, role, state, stateReason, load, pins, incarnation, models, modelsKnown, url }: Instance) {
  return [
    id,
    roleWord(role),
    stateWord(state),
    stateReason,
    load === undefined ? '-' : String(load.running + load.waiting + load.waitingDeferred),
    load === undefined ? '-' : percent(load.kvCacheUsage),
    pins === undefined ? '-' : percent(pins.share),
    String(incarnation?.generation ?? 0),
    modelsKnown ? models.map((model) => model.id).join(',') || '-' : '?',
    url,
  ];
}

function percent(share: number): string {
  return `${Math.round(share * 100)}%`;
}

const WIDE_HEAD = ['ENGINE', 'BLOCK', 'BLOCKS', 'GROUPS', 'HANDLES', 'BIDI', 'EXPIRED', 'TOKENIZE'];

/** What is known of an engine; `-` for what is not. */
function wideCells({ engine, kv, kvExpired }: Instance): readonly string[] {
  const { kind = '', version = '', blockSize = 0, numGpuBlocks = 0, kvGroups = 0, handles = '' } = engine ?? {};
  const number = (value: number) => (value === 0 ? '-' : String(value));
  return [
    `${kind} ${version}`.trim() || '-',
    number(blockSize),
    number(numGpuBlocks),
    number(kvGroups),
    handles || '-',
    kv?.bidirectional || 'auto',
    kvExpired === undefined ? '-' : String(kvExpired),
    engine?.tokenizeMembers.join(',') || '-',
  ];
}

function table(instances: readonly Instance[], wide: boolean): string {
  if (instances.length === 0) return 'no engines\n';
  const rows = wide
    ? [[...HEAD, ...WIDE_HEAD], ...instances.map((instance) => [...cells(instance), ...wideCells(instance)])]
    : [HEAD, ...instances.map(cells)];
  const widths = (rows[0] ?? []).map((_, column) => Math.max(...rows.map((row) => row[column]?.length ?? 0)));
  return rows.map((row) => `${line(row, widths)}\n`).join('');
}

function line(row: readonly string[], widths: readonly number[]): string {
  return row
    .map((cell, column) => cell.padEnd(widths[column] ?? 0))
    .join('  ')
    .trimEnd();
}
