package peer;

import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonParser;

/** One line of input, with typed access to its fields. */
final class Command {
    private final JsonObject fields;

    private Command(JsonObject fields) {
        this.fields = fields;
    }

    static Command parse(String line) {
        try {
            JsonElement parsed = JsonParser.parseString(line);
            if (parsed.isJsonObject()) {
                return new Command(parsed.getAsJsonObject());
            }
        } catch (JsonParseException e) {
            throw new BadCommand("not JSON: " + e.getMessage());
        }
        throw new BadCommand("not a JSON object");
    }

    /** Echoed in the reply as it came; null where the command has none. */
    JsonElement id() {
        return has("id") ? fields.get("id") : JsonNull.INSTANCE;
    }

    boolean has(String field) {
        return fields.has(field) && !fields.get(field).isJsonNull();
    }

    String text(String field) {
        JsonElement value = fields.get(field);
        if (value == null || !value.isJsonPrimitive()) {
            throw new BadCommand("needs the text field \"" + field + "\"");
        }
        return value.getAsString();
    }

    String text(String field, String otherwise) {
        return has(field) ? text(field) : otherwise;
    }

    long number(String field) {
        try {
            return Long.parseLong(text(field));
        } catch (NumberFormatException e) {
            throw new BadCommand("the field \"" + field + "\" is not a whole number");
        }
    }

    /** The fields of a nested object; none where it is missing. */
    JsonObject object(String field) {
        if (!has(field)) {
            return new JsonObject();
        }
        JsonElement value = fields.get(field);
        if (!value.isJsonObject()) {
            throw new BadCommand("the field \"" + field + "\" is not an object");
        }
        return value.getAsJsonObject();
    }
}
