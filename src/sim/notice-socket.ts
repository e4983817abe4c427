import { encode } from '@msgpack/msgpack';
import { Push } from 'zeromq';

/** The bytes of a notice as LMCache writes it; `tag` is the class name of its version. */
export function encodeNotice(transferId: string, tag: 'ProxyNotif' | 'NixlProxyNotif' = 'ProxyNotif'): Uint8Array {
  return encode({ type: tag, req_id: transferId });
}

/** A prefill engine's socket toward the router: ZMQ PUSH, which queues while nobody listens. */
export class NoticeSocket {
  private readonly socket = new Push({ linger: 0, reconnectInterval: 20 });
  private last: Promise<void> = Promise.resolve();

  constructor(endpoint: string) {
    this.socket.connect(endpoint);
  }

  /** Sends one message of one or more frames; messages leave in the order of the calls. */
  send(...frames: readonly Uint8Array[]): Promise<void> {
    this.last = this.last.then(() => this.socket.send([...frames])).catch(() => undefined);
    return this.last;
  }

  close(): void {
    this.socket.close();
  }
}
