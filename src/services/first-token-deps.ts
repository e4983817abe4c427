import type { FirstTokenConnector } from '../connectors/connector.ts';
import type { Receiver } from '../core/receiver.ts';
import type { BufferAdmission } from './buffer-admission.ts';
import type { Drains } from './drains.ts';

/** The notices of one transfer, counted. */
export interface NoticeWaiter {
  /** Resolves when all of them have come; never rejects. */
  readonly arrived: Promise<void>;
  readonly isComplete: boolean;
  /** Forgets the transfer: later notices of it are nobody's. */
  readonly cancel: () => void;
}

/** Where prefill engines tell that KV has been written. */
export interface NoticeSource {
  /** To be called before P can know the id; `count` 0 is complete at once. */
  readonly expect: (transferId: string, count: number) => NoticeWaiter;
}

/** What the first-token hand-over works with, besides what every hand-over does. */
export interface FirstTokenDeps {
  readonly connector: FirstTokenConnector;
  readonly notices: NoticeSource;
  /** Undefined for an instance whose ports nobody configured. */
  readonly receiverOf: (decodeId: string) => Receiver | undefined;
  /** Notices that one prefill of this instance sends; undefined: one for each of D's init ports. */
  readonly noticesOf: (prefillId: string) => number | undefined;
  readonly admission: BufferAdmission;
  readonly drains: Drains;
  /** How long notices may take after P's reply, milliseconds, 0 = no limit; then D computes the prompt itself. */
  readonly noticeMs: number;
  /** What happens to requests that the protocol cannot carry. */
  readonly uncarried: 'refuse' | 'decode';
}
