/** Largest RPC message in bytes, either way: it carries a prompt of 1,048,576 token ids with room to spare. */
export const RPC_MAX_MESSAGE_BYTES = 16 * 1024 * 1024;

/** Longest deadline of a call, milliseconds: beyond it a Node timer fires at once. */
export const RPC_MAX_TIMEOUT_MS = 2_147_483_647;

/** Answers from this size on are compressed for callers that ask for it, bytes. */
export const COMPRESS_MIN_BYTES = 1024;
