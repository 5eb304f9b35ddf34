package peer;

/** The command itself is wrong: unknown op, missing field, unknown client or setting. */
final class BadCommand extends RuntimeException {
    private static final long serialVersionUID = 1L;

    BadCommand(String message) {
        super(message);
    }
}
