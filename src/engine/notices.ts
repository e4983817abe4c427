import { decode } from '@msgpack/msgpack';
import { Publisher, Pull, Subscriber } from 'zeromq';

/** What a frame on the notice socket turned out to be; `orphan` is a good notice that nobody waits for. */
export type NoticeResult = 'matched' | 'orphan' | 'ignored' | 'bad';

/** A TCP address of ZMQ; to bind, the host is an address of this machine, and port 0 takes any free one. */
export interface NoticeAddress {
  readonly host: string;
  readonly port: number;
}

/** Settings of {@link Notices.open}: the address that prefill engines dial. */
export interface NoticeOptions extends NoticeAddress {
  /** Gets every notice as it came, for other processes; see {@link openPublisher}. Closed with the rest. */
  readonly publisher?: Publisher | undefined;
  /** Told of every frame. */
  readonly observe: (result: NoticeResult) => void;
}

/** The notices of one transfer, counted. */
interface Waiter {
  readonly arrived: Promise<void>;
  readonly isComplete: boolean;
  readonly cancel: () => void;
}

interface Entry {
  missing: number;
  readonly complete: () => void;
}

/** Tags that LMCache has written; the older one is of its `nixl_*` settings. */
const TAGS = new Set<unknown>(['ProxyNotif', 'NixlProxyNotif']);
/** Notices that a replica may be behind before it loses some; each has less than a hundred bytes. */
const MAX_BEHIND = 100_000;
/** A hub that went without a word is dialled anew after this time, milliseconds. */
const HEARTBEAT_MS = 5000;
/** A notice has less than a hundred bytes; a larger message is nobody's. */
const MAX_FRAME = 64 * 1024;

/**
 * The transfer that a frame tells of: LMCache's msgpack map with the class name as `type`. `ignored` for another message
 * of the same form (`CancelNotif`) or one without an id of text, `bad` for what is no msgpack map.
 */
export function readNotice(frame: Uint8Array): { readonly transferId: string } | 'ignored' | 'bad' {
  let value: unknown;
  try {
    value = decode(frame);
  } catch {
    return 'bad';
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return 'bad';
  if (!('type' in value) || !TAGS.has(value.type)) return 'ignored';
  const id = 'req_id' in value ? value.req_id : 'req_uuid' in value ? value.req_uuid : undefined;
  return typeof id === 'string' ? { transferId: id } : 'ignored';
}

/**
 * The socket to which prefill engines push a notice when they have written KV into a decode engine (ZMQ PULL), or that of
 * another process which publishes what it gets (ZMQ SUB). Anyone who reaches it may send one: an id that nobody waits for
 * is counted and forgotten.
 */
export class Notices implements AsyncDisposable {
  readonly #socket: Pull | Subscriber;
  readonly #publisher: Publisher | undefined;
  readonly #observe: (result: NoticeResult) => void;
  readonly #waiting = new Map<string, Entry>();
  readonly #reading: Promise<void>;

  private constructor(
    socket: Pull | Subscriber,
    publisher: Publisher | undefined,
    observe: (result: NoticeResult) => void,
  ) {
    this.#socket = socket;
    this.#publisher = publisher;
    this.#observe = observe;
    this.#reading = this.#read();
  }

  /** Binds the socket; rejects with the code of the system's error, e.g. `EADDRINUSE`. */
  static async open({ host, port, publisher, observe }: NoticeOptions): Promise<Notices> {
    // Never hold a prefill engine up, however many tell at once.
    const socket = new Pull({ receiveHighWaterMark: 0, linger: 0, ipv6: isIpv6(host), maxMessageSize: MAX_FRAME });
    await bind(socket, { host, port });
    return new Notices(socket, publisher, observe);
  }

  /** Takes part in the notices that another process publishes; dials it until it is there, and again when it is back. */
  static join({ host, port }: NoticeAddress, observe: (result: NoticeResult) => void): Notices {
    const socket = new Subscriber({
      receiveHighWaterMark: 0,
      linger: 0,
      ipv6: isIpv6(host),
      maxMessageSize: MAX_FRAME,
      heartbeatInterval: HEARTBEAT_MS,
    });
    socket.subscribe();
    socket.connect(endpointOf(host, port));
    return new Notices(socket, undefined, observe);
  }

  /** `host:port` as bound; undefined where nothing listens, because another process publishes. */
  get address(): string | undefined {
    if (this.#socket instanceof Subscriber) return undefined;
    return (this.#socket.lastEndpoint ?? '').replace(/^tcp:\/\//, '');
  }

  /** Transfers that are waited for. */
  get pending(): number {
    return this.#waiting.size;
  }

  /** Waits for `count` notices of a transfer; to be called before P can know the id. */
  expect(transferId: string, count: number): Waiter {
    const waiting = this.#waiting;
    const { promise, resolve } = Promise.withResolvers<void>();
    const entry: Entry = { missing: count, complete: resolve };
    if (count > 0) waiting.set(transferId, entry);
    else resolve();
    return {
      arrived: promise,
      get isComplete() {
        return entry.missing <= 0;
      },
      cancel: () => void waiting.delete(transferId),
    };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#socket.close();
    await this.#reading;
    this.#publisher?.close();
  }

  async #read(): Promise<void> {
    try {
      // A notice is one frame; whoever sends several sends several notices.
      for await (const frames of this.#socket) {
        for (const frame of frames) {
          const notice = readNotice(frame);
          this.#observe(typeof notice === 'string' ? notice : this.#take(notice.transferId));
          if (typeof notice !== 'string') await this.#publisher?.send(frame);
        }
      }
    } catch (error) {
      if (!this.#socket.closed) throw error;
    }
  }

  #take(transferId: string): NoticeResult {
    const entry = this.#waiting.get(transferId);
    if (entry === undefined) return 'orphan';
    entry.missing -= 1;
    if (entry.missing <= 0) {
      this.#waiting.delete(transferId);
      entry.complete();
    }
    return 'matched';
  }
}

/** Binds the socket on which notices are published (ZMQ PUB); rejects as {@link Notices.open} does. */
export async function openPublisher(address: NoticeAddress): Promise<Publisher> {
  const socket = new Publisher({ sendHighWaterMark: MAX_BEHIND, linger: 0, ipv6: isIpv6(address.host) });
  await bind(socket, address);
  return socket;
}

async function bind(socket: Pull | Publisher, { host, port }: NoticeAddress): Promise<void> {
  try {
    // ZMQ binds addresses, not names.
    await socket.bind(endpointOf(host === 'localhost' ? '127.0.0.1' : host, port));
  } catch (error) {
    socket.close();
    throw error;
  }
}

function endpointOf(host: string, port: number): string {
  return `tcp://${isIpv6(host) ? `[${host}]` : host}:${port === 0 ? '*' : port}`;
}

function isIpv6(host: string): boolean {
  return host.includes(':');
}
