import type { Receiver } from '../core/receiver.ts';
import { field, optional } from './fields.ts';
import type { Problem } from './problem.ts';
import {
  bad,
  choiceParser,
  countParser,
  listParser,
  ok,
  parseDuration,
  parseListenHost,
  parsePort,
  parseSize,
  show,
  type ValueParser,
} from './values.ts';

/** What one engine has of its own. */
export interface InstanceLmcache {
  readonly receiverHost?: string;
  readonly initPorts?: readonly number[];
  readonly allocPorts?: readonly number[];
  readonly queryPorts?: readonly number[];
  readonly notices?: number;
}

/** A host, IPv6 without brackets, and a port. */
export interface TcpAddress {
  readonly host: string;
  readonly port: number;
}

/** Settings of the lmcache connector. */
export interface LmcacheConfig {
  readonly proxyHost: string;
  /** 0 takes any free port. */
  readonly proxyPort: number;
  /** Where the notices that come to the socket are published for other processes. */
  readonly noticePublish?: TcpAddress;
  /** Where another process publishes its notices: this one opens no socket of its own. */
  readonly noticeHub?: TcpAddress;
  /** Decode engines by instance id. */
  readonly receivers: Readonly<Record<string, Receiver>>;
  /** Notices of one prefill, by instance id of prefill engines that have a number of their own. */
  readonly notices: Readonly<Record<string, number>>;
  /** The same for the others; absent: one for each of D's init ports. */
  readonly defaultNotices?: number;
  readonly noticeTimeoutMs: number;
  readonly bufferBytes: number;
  readonly chunkTokens: number;
  /** 0: prompts are not held back for the buffer. */
  readonly kvBytesPerToken: number;
  readonly uncarried: 'refuse' | 'decode';
}

const parsePorts: ValueParser<readonly number[]> = (raw) => {
  const ports = listParser(parsePort)(raw);
  return ports.kind === 'ok' && ports.value.length === 0 ? bad('expected at least one port') : ports;
};

const parseHost: ValueParser<string> = (raw) =>
  typeof raw === 'string' && /^[A-Za-z0-9.:_-]+$/.test(raw.trim())
    ? ok(raw.trim())
    : bad(`expected a host name or address, got ${show(raw)}`);

const parseTcpAddress: ValueParser<TcpAddress> = (raw) => {
  const [, name = '', digits = ''] = typeof raw === 'string' ? (/^tcp:\/\/(.+):(\d+)$/.exec(raw.trim()) ?? []) : [];
  const [host, port] = [parseListenHost(name), parsePort(digits)];
  if (host.kind === 'ok' && port.kind === 'ok') return ok({ host: host.value, port: port.value });
  return bad(`expected an address like "tcp://10.0.0.1:8501", got ${show(raw)}`);
};

const MAX_COUNT = 1_000_000_000;

/** Keys of the section `lmcache`. */
export const lmcacheKeys = {
  decoder_init_ports: field(parsePorts, [8300], 'Handshake ports of the decoders, one per tensor-parallel rank.'),
  decoder_alloc_ports: field(parsePorts, [8400], 'Allocation ports of the decoders, one per tensor-parallel rank.'),
  decoder_query_ports: optional(parsePorts, 'none', 'Query ports of the decoders, one per tensor-parallel rank.'),
  proxy_host: field(parseListenHost, 'localhost', 'Address of the notice socket that prefill engines dial.'),
  proxy_port: field(countParser(0, 65_535), 8500, 'Port of the notice socket; 0 takes any free port.'),
  notice_publish: optional(
    parseTcpAddress,
    'none',
    'Address (`tcp://host:port`) where the notices that come to the socket are published for the other replicas.',
  ),
  notice_hub: optional(
    parseTcpAddress,
    'none',
    'The `notice_publish` of another replica: this one gets its notices there and opens no socket.',
  ),
  notices: optional(
    countParser(0, 1024),
    'one for each init port',
    'Notices that one prefill sends (1 for MLA models); 0 waits for none.',
  ),
  notice_timeout: field(
    parseDuration,
    '15s',
    'Waiting for notices after the reply of the prefill engine; then the decode engine computes the prompt itself.',
  ),
  pd_buffer_size: field(parseSize, '2GiB', 'Buffer of a decoder, its own `pd_buffer_size`.'),
  chunk_size: field(countParser(1, MAX_COUNT), 256, 'Tokens of a chunk, the `chunk_size` of the engines.'),
  kv_bytes_per_token: field(
    countParser(0, MAX_COUNT),
    131_072,
    'KV of one token over all ranks; with the two sizes it limits the prompts on their way to a decoder. 0: no limit.',
  ),
  uncarried: field(
    choiceParser(['refuse', 'decode']),
    'refuse',
    'Requests that the protocol cannot carry (`n`, forced tools, grammars): 400, or the decode engine alone.',
  ),
};

/** Keys of `instances[].lmcache`. */
export const instanceLmcacheKeys = {
  receiver_host: optional(parseHost, 'the host of `url`', 'Host of this decoder as prefill engines dial it.'),
  init_ports: optional(parsePorts, '`lmcache.decoder_init_ports`', 'Handshake ports of this decoder.'),
  alloc_ports: optional(parsePorts, '`lmcache.decoder_alloc_ports`', 'Allocation ports of this decoder.'),
  query_ports: optional(parsePorts, '`lmcache.decoder_query_ports`', 'Query ports of this decoder.'),
  notices: optional(countParser(0, 1024), '`lmcache.notices`', 'Notices that one prefill of this engine sends.'),
};

/** A decode engine whose receiver is to be worked out. */
export interface DecoderPlace {
  readonly id: string;
  readonly url: string;
  readonly own: InstanceLmcache | undefined;
  /** Where it is configured, for messages. */
  readonly where: string;
}

/** The three lists that hold for decoders without ports of their own. */
export interface SharedPorts {
  readonly initPorts: readonly number[];
  readonly allocPorts: readonly number[];
  readonly queryPorts: readonly number[];
  readonly where: string;
}

/**
 * The receivers of decoders. The shared lists are those of the first decoder of a host; each further one of the same host
 * counts up by as many ports as a list covers, so that the ports of two decoders never meet.
 */
export function buildReceivers(
  decoders: readonly DecoderPlace[],
  shared: SharedPorts,
): { readonly receivers: Readonly<Record<string, Receiver>>; readonly problems: readonly Problem[] } {
  const problems: Problem[] = [];
  const lists = [shared.initPorts, shared.allocPorts, ...(shared.queryPorts.length === 0 ? [] : [shared.queryPorts])];
  if (lists.some((list) => list.length !== shared.initPorts.length)) {
    problems.push({ where: shared.where, message: 'give as many init, alloc and query ports, one per rank' });
    return { receivers: {}, problems };
  }
  const stride = Math.max(...lists.map((list) => Math.max(...list) - Math.min(...list) + 1));
  const receivers: Record<string, Receiver> = {};
  const onHost = new Map<string, number>();
  const taken = new Map<string, string>();
  for (const { id, url, own, where } of decoders) {
    const host = own?.receiverHost ?? new URL(url).hostname.replace(/^\[(.*)\]$/, '$1');
    const hasOwn = own?.initPorts !== undefined || own?.allocPorts !== undefined;
    const step = hasOwn ? 0 : (onHost.get(host) ?? 0);
    if (!hasOwn) onHost.set(host, step + 1);
    const up = (list: readonly number[]) => list.map((port) => port + step * stride);
    const receiver: Receiver = {
      host,
      initPorts: own?.initPorts ?? up(shared.initPorts),
      allocPorts: own?.allocPorts ?? up(shared.allocPorts),
      queryPorts: own?.queryPorts ?? (hasOwn ? [] : up(shared.queryPorts)),
    };
    const message = faultOf(receiver, id, taken);
    if (message === undefined) receivers[id] = receiver;
    else problems.push({ where, message });
  }
  return { receivers, problems };
}

function faultOf({ host, initPorts, allocPorts, queryPorts }: Receiver, id: string, taken: Map<string, string>) {
  if (initPorts.length !== allocPorts.length || ![0, initPorts.length].includes(queryPorts.length)) {
    return `decoder ${id} needs as many init, alloc and query ports, one per rank`;
  }
  for (const port of [...initPorts, ...allocPorts, ...queryPorts]) {
    if (port > 65_535) return `the ports of decoder ${id} go beyond 65535`;
    const other = taken.get(`${host} ${port}`);
    if (other !== undefined) {
      return `decoders ${other} and ${id} would both take KV at ${host}:${port}; give each its ports (instances[].lmcache)`;
    }
    taken.set(`${host} ${port}`, id);
  }
  return undefined;
}
