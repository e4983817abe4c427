import { decode } from '@msgpack/msgpack';
import { Pull } from 'zeromq';

/** What a frame on the notice socket turned out to be; `orphan` is a good notice that nobody waits for. */
export type NoticeResult = 'matched' | 'orphan' | 'ignored' | 'bad';

/** Settings of {@link Notices}. */
export interface NoticeOptions {
  /** Address to bind; prefill engines dial it. */
  readonly host: string;
  /** 0 takes any free port. */
  readonly port: number;
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
 * The socket to which prefill engines push a notice when they have written KV into a decode engine (ZMQ PULL). Anyone who
 * reaches it may send one: an id that nobody waits for is counted and forgotten.
 */
export class Notices implements AsyncDisposable {
  readonly #socket: Pull;
  readonly #observe: (result: NoticeResult) => void;
  readonly #waiting = new Map<string, Entry>();
  #reading: Promise<void> = Promise.resolve();

  private constructor(socket: Pull, observe: (result: NoticeResult) => void) {
    this.#socket = socket;
    this.#observe = observe;
  }

  /** Binds the socket; rejects with the code of the system's error, e.g. `EADDRINUSE`. */
  static async open({ host, port, observe }: NoticeOptions): Promise<Notices> {
    const isIpv6 = host.includes(':');
    // Never hold a prefill engine up, however many tell at once.
    const socket = new Pull({ receiveHighWaterMark: 0, linger: 0, ipv6: isIpv6, maxMessageSize: MAX_FRAME });
    const name = host === 'localhost' ? '127.0.0.1' : isIpv6 ? `[${host}]` : host;
    try {
      await socket.bind(`tcp://${name}:${port === 0 ? '*' : port}`);
    } catch (error) {
      socket.close();
      throw error;
    }
    const notices = new Notices(socket, observe);
    notices.#reading = notices.#read();
    return notices;
  }

  /** `host:port` as bound. */
  get address(): string {
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
  }

  async #read(): Promise<void> {
    try {
      // A notice is one frame; whoever sends several sends several notices.
      for await (const frames of this.#socket) for (const frame of frames) this.#observe(this.#take(frame));
    } catch (error) {
      if (!this.#socket.closed) throw error;
    }
  }

  #take(frame: Uint8Array): NoticeResult {
    const notice = readNotice(frame);
    if (typeof notice === 'string') return notice;
    const entry = this.#waiting.get(notice.transferId);
    if (entry === undefined) return 'orphan';
    entry.missing -= 1;
    if (entry.missing <= 0) {
      this.#waiting.delete(notice.transferId);
      entry.complete();
    }
    return 'matched';
  }
}
